"""Notices passes that begin with random numbers which an earlier pass began with: somebody put a generator back."""

from ctypes import string_at
from dataclasses import dataclass, field
from typing import Final

from torch import Tensor

from trainsentry.collectors.series import REPEATED_RANDOM, Series
from trainsentry.collectors.torch.device.cpu import CPU
from trainsentry.collectors.torch.device.device import Device
from trainsentry.collectors.torch.device.registry import accelerator, stream_is_captured
from trainsentry.collectors.torch.rows.step_rows import StepRows

REMEMBERED: Final = 8192
"""Newest states that are remembered, at some 100 bytes each: evaluations that seed come more often than that."""

NEW_BEFORE: Final = 20
"""Passes with numbers of their own before one with old numbers counts: programs that seed every step do so from the
first one on, and by design."""


DIGESTED: Final = 256
"""Bytes at either end of a state that are compared. The host's (5,056 bytes, of a Mersenne twister) begins with its
seed, its place and its first words, which are all new after every 624 numbers."""


@dataclass(slots=True)
class _Generator:
    """What is known of the generator of one type of device.

    `seen` holds the step of each state, `last` is that of the newest pass, and `moved` whether another state was seen
    since then: a generator that nobody draws from stays where it is, and repeats nothing.
    """

    seen: dict[int, int] = field(default_factory=dict)
    last: int | None = None
    moved: bool = False
    by_design: bool = False

    def end_step(self, state: int) -> None:
        """Note where the generator is between two steps."""
        self.moved |= state != self.last

    def begin_pass(self, state: int, step: int) -> int | None:
        """Return how many steps ago a pass began with this state; None where it is new, or stands still."""
        if state == self.last and not self.moved:
            return None
        self.last, self.moved = state, False
        earlier = self.seen.pop(state, None)
        self.seen[state] = step
        if earlier is None:
            if len(self.seen) > REMEMBERED:
                del self.seen[next(iter(self.seen))]
            return None
        self.by_design |= len(self.seen) < NEW_BEFORE
        return None if self.by_design else step - earlier


class RandomStates:
    """Appends `repeated_random.<device>`, how many steps ago a pass began with the same random numbers.

    A state costs the host some ten microseconds, as torch keeps it there. Nothing is read while a stream is captured.
    """

    def __init__(self, rows: StepRows) -> None:
        self.rows = rows
        self._step = 0
        self._generators: dict[str, _Generator] = {}
        self._devices: tuple[Device, ...] = ()

    def open_step(self) -> None:
        """Count a step, and note where the generators are as it begins."""
        self._step += 1
        for device, state in self._states():
            if device in self._generators:
                self._generators[device].end_step(state)

    def begin_pass(self) -> None:
        """Look at the generators as a forward pass through the model begins."""
        for device, state in self._states():
            ago = self._generators.setdefault(device, _Generator()).begin_pass(state, self._step)
            if ago is not None:
                name = f"{REPEATED_RANDOM}.{device}"
                self.rows.add_scalar(self.rows.table.series_id(Series(name, name, scalar=True)), float(ago))

    def _states(self) -> list[tuple[str, int]]:
        if stream_is_captured():
            return []
        if not self._devices:  # once: asking for the accelerator may ask the driver
            other = accelerator()
            self._devices = (CPU,) if other is None else (CPU, other)
        states = ((device.type, device.rng_state()) for device in self._devices)
        return [(device, _digest(state)) for device, state in states if state is not None]


def _digest(state: Tensor) -> int:
    """Return a number for the bytes of a state, without an operation of torch."""
    size, address = state.numel(), state.data_ptr()
    if size <= 2 * DIGESTED:
        return hash(string_at(address, size))
    return hash(string_at(address, DIGESTED) + string_at(address + size - DIGESTED, DIGESTED))
