"""Notes weights that an optimizer's step leaves unwritten, or that something else writes, without reading values."""

import math
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainsentry.collectors.series import (
    FROZEN_WEIGHT,
    KEPT,
    MADE_CONSTANT,
    MOST_FROZEN,
    OUTSIDE_WRITES,
    UNWRITTEN,
    WRITTEN_LARGEST,
    WRITTEN_NORM,
    Series,
)
from trainsentry.collectors.shared.made_constant import made_constant
from trainsentry.collectors.shared.model_graph import NamedModule
from trainsentry.collectors.torch.hooks.compiler import has_compiled
from trainsentry.collectors.torch.parameters.gradient_reader import gradient_of
from trainsentry.collectors.torch.parameters.outside_writes import OutsideWrites
from trainsentry.collectors.torch.parameters.readers import state_of
from trainsentry.collectors.torch.rows.local_tensor import is_readable, local, version_of
from trainsentry.collectors.torch.rows.step_rows import StepRows
from trainsentry.collectors.torch.sharding.dtensor import is_dtensor
from trainsentry.collectors.torch.sharding.local_shards import NamedParameter

WRITTEN_BEFORE: Final = 10
"""Updates in a row that wrote to a weight, before one that does not counts: some optimizers write every so often."""

FROZEN_BY_MISTAKE: Final = 0.5
"""Share of an optimizer's weights that may be frozen at once by mistake: who freezes more means to, as a backbone."""

MOST_AT_ONCE: Final = 0.25
"""Share of an optimizer's weights up to which each is told of that something else has written to."""

LOOKS: Final = 3
"""Updates at which such a weight is looked at: one that is held at a bound has the same size at each."""

_VERSION: Final = operator.attrgetter("_version")


@dataclass(eq=False, slots=True)
class _Known:
    """The weights of an optimizer, their marks before its update, and who was left unwritten when.

    `updates` counts the updates; `left_at` maps the place of a weight to the last of them that did not write to it, and
    `has_frozen` says whether some have been told of that require no gradient any more. `steps` are the `step` of all
    weights in a fused optimizer's state; `found_in` is that one's id and size, as a reference would keep a state in
    memory that a checkpoint has replaced.
    """

    owned: list[NamedParameter]
    parameters: list[Tensor]
    are_sharded: bool
    marks: list[Any] | None = None
    found_in: tuple[int, int] = (0, 0)
    steps: list[Any] | None = None
    updates: int = 0
    left_at: dict[int, int] = field(default_factory=dict)
    has_frozen: bool = False
    outside: OutsideWrites = field(default_factory=OutsideWrites)
    looked_at: dict[int, int] = field(default_factory=dict)

    def changes(self) -> list[Any]:
        """Return torch's counts of changes of all weights now."""
        return _marks(self.parameters, are_sharded=self.are_sharded)

    def look_at(self, optimizer: Optimizer) -> list[Any] | None:
        """Return the marks of all weights now, None where this optimizer's updates leave no mark."""
        if not any(group.get("fused") for group in optimizer.param_groups):
            return self.changes()
        state = state_of(optimizer)
        if self.steps is None or self.found_in != (id(state), len(state)):
            self.found_in, self.steps = (id(state), len(state)), _steps_of(state, self.parameters)
        return _marks_of_steps(self.steps)

    def steps_were_replaced(self, optimizer: Optimizer) -> bool:
        """Whether a fused optimizer counts the updates of some weight elsewhere than where they were looked at."""
        if self.steps is None:
            return False
        before, self.steps = self.steps, None
        return any(map(operator.is_not, before, _steps_of(state_of(optimizer), self.parameters)))


class WeightWrites:
    """Appends `unwritten.<parameter>` for each weight that an update has left as it was, unlike the updates before.

    torch counts the writes to a tensor in its version, except those of a fused optimizer, which counts its updates of
    each weight in `step`; fused SGD does not, so nothing is noted of it. An update writes to each weight that has a
    gradient, whatever its learning rate; a weight without one may rest, as that of an expert without tokens does, but
    one that requires no gradient any more was frozen. Where an update writes to none, there is one row, `unwritten`:
    they have gradients, or the model has other weights in their places. `in_model` returns the parameters that the
    model has now; `note_left` takes the weights without a gradient, which others may have replaced. What something
    other than the update has written to is told of as `outside_writes.<parameter>`, or `outside_writes` for most of
    them; where that goes on, `written_norm.<parameter>` and `written_largest.<parameter>` tell its size.
    LBFGS stops writing where it has converged, and compiled code writes as its compiler likes, so nothing is noted of
    them.
    """

    def __init__(
        self,
        rows: StepRows,
        in_model: Callable[[], Iterable[Tensor]],
        note_left: Callable[[Iterable[NamedParameter]], None] = lambda _: None,
    ) -> None:
        self.rows = rows
        self.in_model = in_model
        self.note_left = note_left
        self._known: weakref.WeakKeyDictionary[Optimizer, _Known] = weakref.WeakKeyDictionary()

    def begin(self, optimizer: Optimizer, owned: list[NamedParameter]) -> None:
        """Note the weights before an update: the same list where nothing has changed."""
        if has_compiled() or isinstance(optimizer, torch.optim.LBFGS):
            self._known.pop(optimizer, None)
            return
        known = self._known.get(optimizer)
        if known is None or known.owned is not owned:
            parameters = [named.parameter for named in owned]
            known = self._known[optimizer] = _Known(owned, parameters, any(map(is_dtensor, parameters)))
        known.marks = known.look_at(optimizer)
        changes = known.marks if known.steps is None else known.changes()
        self._note_outside(known, known.outside.more_often(changes))
        self._note_lasting(known, known.outside.lasting.due)
        if known.steps is not None:  # a fused update leaves the counts as they are
            known.outside.counts = changes

    def updated(self, optimizer: Optimizer) -> None:
        """Compare the weights after an update."""
        known = self._known.get(optimizer)
        if known is None or known.marks is None:
            return
        before, known.marks = known.marks, None
        now = known.look_at(optimizer)
        if now is None:  # a fused optimizer's state is gone
            return
        if known.steps is None:
            known.outside.counts = now
        same = list(map(operator.eq, before, now))
        known.updates += 1
        if True in same and not known.steps_were_replaced(optimizer):
            self._note(known, [i for i, unchanged in enumerate(same) if unchanged])

    def _note(self, known: _Known, unwritten: list[int]) -> None:
        due = [i for i in unwritten if known.updates - known.left_at.get(i, 0) > WRITTEN_BEFORE]
        known.left_at.update((i, known.updates) for i in unwritten)
        weights = [known.owned[i] for i in due]
        kept = [n for n in weights if n.parameter.requires_grad and gradient_of(n.parameter) is not None]
        if weights and len(weights) == len(known.parameters):
            if kept or not {id(p) for p in self.in_model()} & {id(n.parameter) for n in weights}:
                self._append(UNWRITTEN, "", KEPT)
            return
        self._note_frozen(known, [named for named in weights if not named.parameter.requires_grad])
        if not known.are_sharded and len(kept) < len(weights):
            self.note_left(n for n in weights if n.parameter.requires_grad and gradient_of(n.parameter) is None)
        for named in kept:
            self._append(f"{UNWRITTEN}.{named.name}", named.module, KEPT)

    def _note_frozen(self, known: _Known, frozen: list[NamedParameter]) -> None:
        """Tell of weights that were frozen: once, as who freezes again follows a schedule, and not of most at once."""
        if frozen and not known.has_frozen:
            known.has_frozen = True
            if len(frozen) > FROZEN_BY_MISTAKE * len(known.owned):
                self._append(UNWRITTEN, "", MOST_FROZEN)
                return
            for named in frozen:
                self._append(f"{UNWRITTEN}.{named.name}", named.module, FROZEN_WEIGHT)

    def _note_outside(self, known: _Known, written: list[int]) -> None:
        """Append what something else has written to: each weight of a few, or one row for most of them."""
        if len(written) <= max(1, MOST_AT_ONCE * len(known.owned)):
            for named in (known.owned[i] for i in written):
                self._append(f"{OUTSIDE_WRITES}.{named.name}", named.module, 1.0)
        elif 2 * len(written) > len(known.owned):
            self._append(OUTSIDE_WRITES, "", float(len(written)))

    def _note_lasting(self, known: _Known, due: list[int]) -> None:
        """Append the sizes of weights that something else writes to again and again, at some updates."""
        if due and len(due) <= max(1, MOST_AT_ONCE * len(known.owned)):
            known.looked_at |= dict.fromkeys(due, LOOKS)
        for place, left in list(known.looked_at.items()):
            known.looked_at[place] -= 1
            if left == 1:
                del known.looked_at[place]
            named = known.owned[place]
            part = local(named.parameter)
            if part.numel() and is_readable(part) and part.is_floating_point():
                fine = torch.promote_types(part.dtype, torch.float32)  # a norm of three digits would stand still
                for what, order in ((WRITTEN_NORM, 2.0), (WRITTEN_LARGEST, math.inf)):
                    size = torch.linalg.vector_norm(part, order, dtype=fine)
                    self._append(f"{what}.{named.name}", named.module, size)

    def tell_constants(self, parameters: list[NamedParameter], modules: Iterable[NamedModule]) -> None:
        """Append a row for each parameter that a module of the model's own has made without a gradient."""
        for series in made_constant(parameters, modules, lambda p: not p.own.requires_grad, _is_layer):
            self.rows.add_scalar(self.rows.table.series_id(series), MADE_CONSTANT)

    def _append(self, name: str, module: str, value: float | Tensor) -> None:
        series = Series(name, name, module=module, scalar=True)
        self.rows.add_scalar(self.rows.table.series_id(series), value)


def _is_layer(module: nn.Module) -> bool:
    """Return whether a module is one of torch's own layers, or made from one; a container has no parameters."""
    homes = [(c.__module__, c) for c in type(module).__mro__]
    return any(
        home.startswith("torch.nn.modules.") and home != "torch.nn.modules.container" and c is not nn.Module
        for home, c in homes
    )


def _marks(parameters: list[Tensor], *, are_sharded: bool) -> list[Any]:
    """Return what each write to a parameter changes: its count of changes, for a sharded one that of its part here."""
    if are_sharded:
        parts = [getattr(p, "_local_tensor", p) for p in parameters]  # another part may have taken its place
        return [(id(part), version_of(part)) for part in parts]
    try:
        return list(map(_VERSION, parameters))
    except RuntimeError:  # an inference tensor has no count
        return list(map(version_of, parameters))


def _steps_of(state: Mapping[Any, Any], parameters: list[Tensor]) -> list[Any]:
    """Return each weight's `step` in a fused optimizer's state, None where there is none."""
    return [state[p].get("step") if p in state else None for p in parameters]


def _marks_of_steps(steps: list[Any]) -> list[Any] | None:
    """Return the count of changes of each weight's `step`, -1 where there is none; None where there is none at all."""
    try:
        return list(map(_VERSION, steps))
    except (AttributeError, RuntimeError):  # some weight has none yet, or it is no tensor
        marks = [version_of(step) if isinstance(step, Tensor) else -1 for step in steps]
        return None if set(marks) <= {-1} else marks
