"""Checks of a device of torch: which it is, its numbers, its kernels, its overflow mode, and how fast it is read."""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Final

import torch

from trainsentry.collectors.series import Series, SeriesTable
from trainsentry.collectors.torch.device.device import Device
from trainsentry.collectors.torch.device.registry import accelerator, available_devices, device_of, known_devices
from trainsentry.collectors.torch.rows.step_rows import StepRows
from trainsentry.monitor.doctor.check import REPORT, Check, attempt

AUTO: Final = "auto"

BYTES: Final = {True: 2**25, False: 2**27}
"""Bytes that are read and copied to compare their speeds, on the host and on a device: more than the caches hold."""

FREE_SHARE: Final = 32
"""Of the device's free memory, one part in so many is read: plain operations need several copies of what they read."""

REPEATS: Final = 5

LEAST_SHARE: Final = 0.3
"""Share of a copy's bandwidth below which reading counts as slow: plain operations of torch reach a tenth."""


def chosen_device(name: str) -> Device | None:
    """Return the type of device for `--device`: torch's accelerator, else the host, for auto; None for an unknown one.

    An NPU is there when torch has loaded torch_npu, which it does by itself where that is installed.
    """
    if name == AUTO:
        return accelerator() or device_of("cpu")
    return device_of(name) if name in {device.type for device in known_devices()} else None


def device_checks(device: Device) -> Iterator[Check]:
    """Yield the checks; only the first where the device cannot be used."""
    if not device.is_available():
        others = ", ".join(d.type for d in available_devices())
        found = f"no {device.type} can be used; there are: {others}"
        yield Check("device", "missing", found, device.needs)
        return
    for one in device.devices():
        of = device.properties(one)
        memory = f"{of.memory_bytes / 2**30:.0f} GB" if of.memory_bytes else "memory unknown"
        yield Check(f"device {one}", "OK", f"{of.name or device.type}, {memory}, {of.processors} processors")
    versions = ", ".join(f"{name} {version}" for name, version in device.versions().items())
    yield Check("device software", "OK", versions or "none of its own")
    yield _numbers(device)
    yield _triton(device)
    yield _overflow(device)
    yield from attempt("reading of tensors", lambda: _bandwidth(device))


def _numbers(device: Device) -> Check:
    if not device.has_float64:
        return Check("float64", "OK", "the device has none: statistics, and sums compared between ranks, are float32")
    made = torch.ones(1, dtype=torch.float64, device=device.type)
    if made.dtype is torch.float64:
        return Check("float64", "OK", "statistics are summed in float64")
    return Check("float64", "wrong", f"a float64 tensor becomes {made.dtype}", REPORT)


def _triton(device: Device) -> Check:
    if device.on_host:
        return Check("Triton", "OK", "not needed on the host")
    if device.has_triton():
        return Check("Triton", "OK", "compiles for this device")
    found = "does not compile for this device: plain operations read it"
    return Check("Triton", "slow", found, f"pip install {device.triton_package}")


def _overflow(device: Device) -> Check:
    torch.ones(1, device=device.type)  # the mode is known once the device is in use
    if device.overflow_flag() is None:
        return Check("overflow", "OK", "shows as Inf or NaN in the values")
    return Check("overflow", "OK", "saturates: the device's flag and the largest values show it")


def _bandwidth(device: Device) -> Check:
    free = device.memory(torch.device(device.type)).free
    count = min(BYTES[device.on_host], free // FREE_SHARE or BYTES[device.on_host]) // 4
    x = torch.randn(count, device=device.type)
    copied = torch.empty_like(x)
    rows = StepRows(SeriesTable())
    series = rows.table.series_id(Series("doctor", "gradient"))

    def read() -> None:
        rows.add_many([series], [x])
        rows.take().wait()

    # A copy moves each byte twice, reading moves it once.
    reading, copying = x.nbytes / _seconds(device, read), 2 * x.nbytes / _seconds(device, lambda: copied.copy_(x))
    share = reading / copying
    found = f"{reading / 1e9:.1f} GB/s read, {share:.0%} of a copy's {copying / 1e9:.1f} GB/s"
    if share >= LEAST_SHARE:
        return Check("reading of tensors", "OK", found)
    return Check("reading of tensors", "slow", found, "see Triton above; sample less often, or set overhead_budget")


def _seconds(device: Device, action: Callable[[], object]) -> float:
    """Return the median seconds of an action that the device has finished; the first, which compiles, is left out."""
    taken = []
    for _ in range(REPEATS + 1):
        device.synchronize(torch.device(device.type))
        began = time.perf_counter()
        action()
        device.synchronize(torch.device(device.type))
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])
