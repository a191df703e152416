"""Notes buffers and averages that were written again and again, and that nothing writes any more."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeGuard

from torch import Tensor, nn

from trainsentry.collectors.series import STOPPED_WRITES, Series
from trainsentry.collectors.torch.hooks.compiler import has_compiled
from trainsentry.collectors.torch.rows.local_tensor import version_of
from trainsentry.collectors.torch.rows.step_rows import StepRows
from trainsentry.collectors.torch.sharding.model_names import ModelNames

WRITTEN_BEFORE: Final = 20
"""Looks at which a tensor must have been found written: an average follows each update, a switch is thrown once."""

LONGER: Final = 10
"""The rest after which a tensor has stopped, as a multiple of its longest: some averages are taken every hundred
updates."""

SWITCH: Final = 3
"""Looks at which a switch has been found written. Where one is thrown as others stop, they stop by design: the
observers of quantized training are switched off by such buffers."""

LOOK_EVERY: Final = 8
"""Updates between two looks, which take 0.2 ms for a thousand tensors."""

STOPPED: Final = 25
"""Looks without a write after which a tensor has stopped: two hundred updates."""

MOST: Final = 1000
"""Tensors that are looked at, the first of the model."""


@dataclass(eq=False, slots=True)
class StoppedWrites:
    """How often each of several things was found written, and how long it has rested since.

    Each rests for `least` looks, or for `LONGER` times its longest rest, before it has stopped. `written` counts the
    looks at which each was written, but for the present stretch, which began, like the present rest, at the look
    `since`, in the step `since_step`. `resting` has how long each may rest that was written for long and rests now.
    """

    number: int
    least: int
    looks: int = 0
    before: Sequence[int] = ()
    written: list[int] = field(default_factory=list)
    since: list[int] = field(default_factory=list)
    since_step: list[int] = field(default_factory=list)
    longest: list[int] = field(default_factory=list)
    resting: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.before = [0] * self.number
        self.written, self.since, self.since_step, self.longest = ([0] * self.number for _ in range(4))

    def after(self, writes: Sequence[int], step: int, switches: Sequence[bool] | None = None) -> dict[int, int]:
        """Return, by the places of what has stopped, the `step` of the look that first found it unwritten.

        `writes` says what was written since the last look; `switches` masks what may be a switch, all without it.
        """
        self.looks += 1
        if writes != self.before:
            self._note_changes(writes, step, switches)
            self.before = writes
        stopped = [i for i, longest in self.resting.items() if self.looks - self.since[i] >= longest]
        for i in stopped:
            del self.resting[i]
        return {i: self.since_step[i] for i in stopped}

    def _note_changes(self, writes: Sequence[int], step: int, switches: Sequence[bool] | None) -> None:
        stopping = []
        for i, (count, before) in enumerate(zip(writes, self.before, strict=True)):
            if count and not before:
                self.longest[i] = max(self.longest[i], self.looks - self.since[i] if self.written[i] else 0)
                self.resting.pop(i, None)
            elif before and not count:
                self.written[i] += self.looks - self.since[i]
                stopping.append(i)
            else:
                continue
            self.since[i], self.since_step[i] = self.looks, step
        rests = {i: max(self.least, LONGER * self.longest[i]) for i in stopping if self.written[i] >= WRITTEN_BEFORE}
        if rests and not self._throws_switch(writes, switches):
            self.resting |= rests

    def _throws_switch(self, writes: Sequence[int], switches: Sequence[bool] | None) -> bool:
        """Whether a switch is written, or was at the look before, that hardly ever is."""
        return any(
            (count or self.before[i]) and self._times(i) < SWITCH
            for i, count in enumerate(writes)
            if switches is None or switches[i]
        )

    def _times(self, place: int) -> int:
        """Return the number of looks at which something was written, the present stretch among them."""
        return self.written[place] + (self.looks - self.since[place] if self.before[place] else 0)


class StoppedTensors:
    """Appends `stopped_writes.<tensor>`, with the steps since, for what is kept up to date no more.

    That are buffers, and parameters that require no gradient, in which averages of others are kept. torch counts writes
    in a tensor's version, except those of its own batch norm and those of compiled code, beside which nothing is noted.
    A copy that averages weights is in evaluation mode all along; what was written in training mode rests without it.
    """

    def __init__(self, rows: StepRows, names: ModelNames) -> None:
        self.rows = rows
        self.names = names
        self._known_of = -1
        self._updates = self._looked_at = 0
        self._places: list[tuple[nn.Module, str, str, dict[str, Any]]] = []  # a module may replace what it holds
        self._are_switches: list[bool] = []
        self._trained: list[bool] = []  # whether their modules were in training mode when they were written
        self._marks: list[_Mark | None] = []
        self._stopped = StoppedWrites(0, STOPPED)

    def read(self, step: int) -> None:
        """Look at every few updates what was written since."""
        self._updates += 1
        if self._updates % LOOK_EVERY or has_compiled():
            return
        if self._known_of != len(self.names.modules):
            self._begin()
        marks = [_mark(held.get(own)) for _, _, own, held in self._places]
        before, self._marks = self._marks, marks
        if not before:
            return
        writes = [int(_is_written(mark, then)) for mark, then in zip(marks, before, strict=True)]
        looked_at, self._looked_at = self._looked_at, step
        for i in (i for i, count in enumerate(writes) if count):
            self._trained[i] = self._places[i][0].training
        for place, since in self._stopped.after(writes, looked_at + 1, self._are_switches).items():
            module, path, own, _ = self._places[place]
            if module.training or not self._trained[place]:  # a norm, or a code book, that is frozen rests by design
                self._append(f"{path}.{own}" if path else own, path, step - since)

    def _begin(self) -> None:
        """Take the tensors of the modules that are watched now, and learn anew."""
        self._known_of, self._marks = len(self.names.modules), []
        held = [(named, d) for named in self.names.modules for d in (named.module._buffers, named.module._parameters)]
        kept = [(named, own, d) for named, d in held for own, tensor in d.items() if _is_kept(tensor)][:MOST]
        self._places = [(named.module, named.name, own, d) for named, own, d in kept]
        self._trained = [named.module.training for named, _, _ in kept]
        self._are_switches = [d[own].numel() == 1 for _, own, d in kept]
        self._stopped = StoppedWrites(len(kept), STOPPED)

    def _append(self, tensor: str, module: str, steps: int) -> None:
        name = f"{STOPPED_WRITES}.{tensor}"
        self.rows.add_scalar(self.rows.table.series_id(Series(name, name, module=module, scalar=True)), float(steps))


def _is_kept(tensor: Tensor | None) -> TypeGuard[Tensor]:
    return tensor is not None and not tensor.requires_grad


_Mark = tuple["weakref.ref[Tensor]", int | None]
"""A tensor and its version: another tensor in its place may have got its address."""


def _mark(tensor: Tensor | None) -> _Mark | None:
    """Return what a write changes, and another tensor in its place; None for one that an optimizer may write to."""
    return (weakref.ref(tensor), version_of(tensor)) if _is_kept(tensor) else None


def _is_written(now: _Mark | None, then: _Mark | None) -> bool:
    return now is None or then is None or now[0] is not then[0] or now[1] != then[1]
