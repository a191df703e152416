"""Reads tensors on a device for a dump: by few launches, and by one copy to the host for all of them."""

import logging
from typing import Any, Final

import torch
from torch import Tensor

from trainsentry.collectors.torch.calls.fact_values import fill, fill_integral
from trainsentry.collectors.torch.rows.device_rows import DeviceRows
from trainsentry.collectors.torch.rows.gathered_tensors import StorageFacts
from trainsentry.collectors.torch.rows.local_tensor import PLAIN, version_of

logger = logging.getLogger("trainsentry")

Reading = list[dict[str, Any]]
"""The descriptions that wait for the values of one tensor; empty once they have them."""

INTEGERS: Final = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
"""Dtypes of which devices find the smallest and the largest value; of other integers they do not."""


class DeviceFacts:
    """Tensors of one device that were described and not yet settled.

    A tensor is read together with others, before anything may change it: `read_waiting` says that something may. Once
    a tensor has changed all the same, each is read when it is described.
    """

    def __init__(self, device: torch.device) -> None:
        self._at_once = False
        self._rows = DeviceRows(device)
        self._readings: list[Reading] = []
        self._integers: list[tuple[Reading, Tensor]] = []

    def __bool__(self) -> bool:
        """Whether a description waits for its values."""
        return bool(self._readings or self._integers)

    def read(self, x: Tensor, implicit_zeros: int, reading: Reading) -> None:
        """Read a tensor of this device for a reading, which other descriptions may join until it is settled."""
        if x.dtype in INTEGERS:
            low, high = torch.aminmax(x.reshape(-1))
            self._integers.append((reading, torch.stack([low, high]).long()))
        elif x.is_floating_point() or x.is_complex():
            self._read_row(x, implicit_zeros)
            self._readings.append(reading)

    def _read_row(self, x: Tensor, implicit_zeros: int) -> None:
        is_plain = not implicit_zeros and type(x) in PLAIN
        x = self._rows.in_one_piece(x) if is_plain else x
        version = version_of(x) if is_plain else None
        address = 0 if version is None else self._rows.address_in_place(x)
        if version is None or not address:
            self._rows.add(len(self._readings), x, implicit_zeros)
            return
        self._rows.gather(len(self._readings), x, address, version, StorageFacts.of(x))
        if self._at_once:
            self._rows.read_gathered()

    def read_waiting(self) -> None:
        """Read the tensors that wait to be read together: they may change from now on."""
        self._rows.read_gathered()

    def settle(self) -> None:
        """Wait for the device, once, and fill in all descriptions."""
        readings, self._readings = self._readings, []
        integers, self._integers = self._integers, []
        if readings:
            self._settle_rows(readings)
        if integers:
            for (reading, _), (low, high) in zip(integers, _on_host([x for _, x in integers]), strict=True):
                for facts in reading:
                    fill_integral(facts, low, high)
                reading.clear()

    def _settle_rows(self, readings: list[Reading]) -> None:
        positions, values, event = self._rows.copy_to_host()
        if event is not None:
            event.synchronize()
        missing = {*self._rows.overwritten, *self._rows.lost}
        if self._rows.overwritten:
            self._at_once = True
            logger.warning(
                "trainsentry: %d tensors changed before they were read, by code that torch does not show, so the dump "
                "lacks their statistics. From now on each is read at once.",
                len(self._rows.overwritten),
            )
        for position, row in zip(positions.tolist(), values().tolist(), strict=True):
            if position not in missing:
                for facts in readings[position]:
                    fill(facts, row)
        for reading in readings:
            reading.clear()
        self._rows.clear()


def _on_host(pairs: list[Tensor]) -> list[list[int]]:
    """Return tensors of shape (2,) as numbers, by one copy."""
    numbers: list[list[int]] = torch.stack(pairs).cpu().tolist()
    return numbers
