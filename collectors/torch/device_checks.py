"""Reads what devices say of themselves at the end of a step: overflow flags, and faults that their checks found."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from trainsentry.collectors.guard import Guard
from trainsentry.collectors.series import OVERFLOW_FLAG
from trainsentry.collectors.torch.device.device import Device
from trainsentry.collectors.torch.device.registry import device_of
from trainsentry.collectors.torch.sharding.local_shards import NamedParameter

FAULTS: Final = "device faults"
"""The part that reads what a device's own checks have found."""


class DeviceChecks:
    """Reads the devices of parameters; `log(name, value, micro_step)` appends a scalar."""

    def __init__(self, guard: Guard, log: Callable[[str, Any, int], None]) -> None:
        self._guard = guard
        self._log = log
        self._saturates: bool | None = None
        self._flags_are_clear = False
        self._faults: dict[str, int] = {}
        self._checked: list[Device] | None = None

    def read(self, parameters: Sequence[NamedParameter]) -> None:
        """Append what the devices say at the end of a step."""
        self._guard.run(OVERFLOW_FLAG, self._read_overflow_flags, parameters)
        self._guard.run(FAULTS, self._read_faults, parameters)

    def _read_overflow_flags(self, parameters: Sequence[NamedParameter]) -> None:
        """Append the overflow flags of devices that saturate; what was set before the first step does not count."""
        if self._saturates is None:  # known from the first step on, before which a model may still be moved
            self._saturates = saturates(parameters)
        if not self._saturates:
            return
        devices: dict[torch.device, None] = dict.fromkeys(p.parameter.device for p in parameters)
        found = [status for d in devices if (status := device_of(d).overflow_status(d)) is not None]
        for status in found if self._flags_are_clear else ():
            self._log(OVERFLOW_FLAG, status, 0)
        self._flags_are_clear = True

    def _read_faults(self, parameters: Sequence[NamedParameter]) -> None:
        """Append how many faults the device's own checks have found since the last step, where they found any."""
        if self._checked is None:
            self._checked = [device_of(kind) for kind in _types_of(parameters)]
        for device in self._checked:
            for kind, count in device.faults().items():
                new = count - self._faults.get(kind, count)
                self._faults[kind] = count
                if new:
                    self._log(kind, float(new), 0)


def saturates(parameters: Sequence[NamedParameter]) -> bool:
    """Whether a parameter's device stores the largest finite value where a result overflows."""
    return any(device_of(kind).overflow_flag() is not None for kind in _types_of(parameters))


def _types_of(parameters: Sequence[NamedParameter]) -> list[str]:
    return list(dict.fromkeys(p.parameter.device.type for p in parameters))
