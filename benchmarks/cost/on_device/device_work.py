"""What a device did: its launches, copies and time, its memory. All that depends on the kind of device stands here."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Work:
    """Kernels launched, copies and fills, and the seconds that the kernels ran: all, and by name."""

    launches: int
    copies: int
    seconds: float
    by_name: dict[str, float]


def work_of(run: Callable[[], Any], device: torch.device, times: int = 1) -> Work | None:
    """Return what the device does in one call, the mean of `times`; None where torch's profiler does not count it.

    From the first profile of a process on every launch takes the host longer: on an H200 a bare step of 8.6 ms took 11.
    So nothing is timed by the host's clock after it.
    """
    if device.type != "cuda":
        return None
    for repeats in (1, times):  # the first profile starts the profiler
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for _ in range(repeats):
                run()
            synchronize(device)
    events = [event for event in profiled.events() if event.device_type == DeviceType.CUDA]
    kernels = [event for event in events if not event.name.startswith(("Memcpy", "Memset"))]
    by_name: dict[str, float] = {}
    for kernel in kernels:
        by_name[kernel.name] = by_name.get(kernel.name, 0.0) + kernel.time_range.elapsed_us() / 1e6 / times
    moves = len(events) - len(kernels)
    return Work(round(len(kernels) / times), round(moves / times), sum(by_name.values()), by_name)


def find_device(choice: str) -> torch.device | None:
    """Return the chosen device; for `auto` torch's accelerator, None where there is none."""
    if choice != "auto":
        return torch.device(choice)
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def name_of(device: torch.device) -> str:
    """Return the name of the device."""
    module = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else f"no accelerator ({device})"


def synchronize(device: torch.device) -> None:
    """Wait until the device has done everything."""
    torch.get_device_module(device).synchronize()


def seconds_of(run: Callable[[], Any], device: torch.device, times: int = 1) -> float:
    """Return the seconds of one call, until the device has done it; the mean of `times`."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(times):
        run()
    synchronize(device)
    return (time.perf_counter() - start) / times


def peak_memory(run: Callable[[], Any], device: torch.device) -> float | None:
    """Return the MB of device memory that a call has at its peak, above those before it; None where none counts."""
    module = torch.get_device_module(device)
    if not hasattr(module, "reset_peak_memory_stats"):
        run()
        return None
    free_memory(device)
    module.reset_peak_memory_stats()
    before = module.memory_allocated()
    run()
    synchronize(device)
    return float(module.max_memory_allocated() - before) / 2**20


def free_memory(device: torch.device) -> None:
    """Give back what is no longer used."""
    gc.collect()
    module = torch.get_device_module(device)
    if hasattr(module, "empty_cache"):
        module.empty_cache()


@contextmanager
def forbidden_to_wait(device: torch.device) -> Iterator[bool]:
    """Raise RuntimeError at every wait of the host for the device; yield whether this device can."""
    module = torch.get_device_module(device)
    if not hasattr(module, "set_sync_debug_mode"):
        yield False
        return
    module.set_sync_debug_mode("error")
    try:
        yield True
    finally:
        module.set_sync_debug_mode("default")
