"""Registers the types of devices, and finds the one of a tensor."""

from typing import Final

import torch
from torch import Tensor

from trainsentry.collectors.torch.device.cpu import CPU
from trainsentry.collectors.torch.device.cuda import CUDA
from trainsentry.collectors.torch.device.device import Device, KernelDumpSwitch, OverflowFlag
from trainsentry.collectors.torch.device.npu import NPU

_WITHOUT_FLOAT64: Final = frozenset({"mps"})
"""Types of torch's other devices that have no float64."""

_devices: dict[str, Device] = {device.type: device for device in (CPU, CUDA, NPU)}


def register_device(device: Device) -> None:
    """Add a type of device; call it before `watch`.

    Raises:
        ValueError: when a device of that type is registered.

    """
    if device.type in _devices:
        names = ", ".join(_devices)
        raise ValueError(f"register_device: {device.type!r} is registered; allowed: any type except {names}")
    _devices[device.type] = device


def unregister_device(device: Device) -> None:
    """Undo `register_device`."""
    del _devices[device.type]


def device_of(of: "Tensor | torch.device | str") -> Device:
    """Return the type of device that holds a tensor, or of a `torch.device`, or of a name such as "npu:0".

    A type that is not registered is served by the base class, as torch describes all accelerators alike.
    """
    if isinstance(of, Tensor):
        return _of_type(of.device.type)
    return _of_type(of.partition(":")[0] if isinstance(of, str) else of.type)


def _of_type(device_type: str) -> Device:
    found = _devices.get(device_type)
    if found is None:
        found = _devices[device_type] = Device(device_type, has_float64=device_type not in _WITHOUT_FLOAT64)
    return found


def known_devices() -> tuple[Device, ...]:
    """Return all types of devices that are registered, the host first, and torch's current accelerator."""
    accelerator()
    return tuple(_devices.values())


def available_devices() -> list[Device]:
    """Return the types of devices that can be used, the host first."""
    return [device for device in known_devices() if device.is_available()]


def accelerator() -> Device | None:
    """Return the type of torch's current accelerator; None where only the host can be used.

    A backend whose import failed half-way counts as none: torch then knows its name and raises for the rest.
    """
    try:
        current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    except (AttributeError, ImportError, RuntimeError):
        return None
    return None if current is None else device_of(current)


def kernel_dump() -> KernelDumpSwitch | None:
    """Return the switch of the dump of kernels of the first device that has one; None on a machine without."""
    found = (device.kernel_dump() for device in tuple(_devices.values()))
    return next((switch for switch in found if switch is not None), None)


class DeviceOverflowFlags:
    """The overflow flags of all devices in use that saturate, for a task that clears them before each call.

    They are looked for at each call: a debugger may be made before its model is on a device. A loss scaler reads the
    flags too, so what is cleared is remembered, and `restore` sets it again.
    """

    def __init__(self) -> None:
        self._overflowed: set[str] = set()

    def clear(self) -> None:
        """Clear the flags; waits for devices that saturate."""
        self.is_set()
        for _, flag in self._flags():
            flag.clear()

    def is_set(self) -> bool:
        """Whether an operation has overflowed since the last `clear`; waits for devices that saturate."""
        found = {device.type for device, flag in self._flags() if flag.is_set()}
        self._overflowed |= found
        return bool(found)

    def restore(self) -> None:
        """Set the flags again that have been set since the last `restore`."""
        for device, flag in self._flags():
            if device.type in self._overflowed:
                flag.set()
        self._overflowed.clear()

    @staticmethod
    def _flags() -> list[tuple[Device, OverflowFlag]]:
        found = ((device, device.overflow_flag()) for device in tuple(_devices.values()))
        return [(device, flag) for device, flag in found if flag is not None]


def stream_is_captured() -> bool:
    """Whether this thread's current stream, on any accelerator in use, is being captured."""
    for device in tuple(_devices.values()):  # noqa: SIM110 - a generator takes as long again, four times a step
        if device is not CPU and device.is_capturing():
            return True
    return False
