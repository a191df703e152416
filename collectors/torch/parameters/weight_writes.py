"""Notes weights that an optimizer's step leaves unwritten, without reading their values."""

import operator
import weakref
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor
from torch.optim import Optimizer

from trainsentry.collectors.series import UNWRITTEN, Series
from trainsentry.collectors.torch.hooks.compiler import has_compiled
from trainsentry.collectors.torch.parameters.gradients import gradient_of
from trainsentry.collectors.torch.rows.local_tensor import version_of
from trainsentry.collectors.torch.rows.step_rows import StepRows
from trainsentry.collectors.torch.sharding.dtensor import is_dtensor
from trainsentry.collectors.torch.sharding.local_shards import NamedParameter

WRITTEN_BEFORE: Final = 10
"""Updates in a row that wrote to a weight, before one that does not counts: some optimizers write every so often."""

_VERSION: Final = operator.attrgetter("_version")

KEPT, FROZEN = 1.0, 2.0
"""Values of a row: a weight with a gradient, and one that requires no gradient any more."""


@dataclass(eq=False, slots=True)
class _Known:
    """The weights of an optimizer, their marks after its last update, and who was left unwritten when.

    `updates` counts the updates; `left_at` maps the place of a weight to the last of them that did not write to it, and
    `has_frozen` says whether some have been told of that require no gradient any more.
    """

    owned: list[NamedParameter]
    parameters: list[Tensor]
    are_sharded: bool
    marks: list[Any]
    updates: int = 0
    left_at: dict[int, int] = field(default_factory=dict)
    has_frozen: bool = False


class WeightWrites:
    """Appends `unwritten.<parameter>` for each weight that an update has left as it was, unlike the updates before.

    torch counts the writes to a tensor in its version. An update writes to each weight that has a gradient, whatever
    its learning rate; a weight without one may rest, as that of an expert without tokens does, but one that requires no
    gradient any more was frozen. Where an update writes to none, there is one row, `unwritten`. Compiled code writes as
    its compiler likes, so beside it nothing is noted.
    """

    def __init__(self, rows: StepRows) -> None:
        self.rows = rows
        self._known: weakref.WeakKeyDictionary[Optimizer, _Known] = weakref.WeakKeyDictionary()

    def updated(self, optimizer: Optimizer, owned: list[NamedParameter]) -> None:
        """Note an update of the weights that an optimizer owns: the same list where nothing has changed."""
        if has_compiled():
            self._known.clear()
            return
        known = self._known.get(optimizer)
        if known is None or known.owned is not owned:
            parameters = [named.parameter for named in owned]
            are_sharded = any(map(is_dtensor, parameters))
            self._known[optimizer] = _Known(owned, parameters, are_sharded, _marks(parameters, are_sharded=are_sharded))
            return
        before, known.marks = known.marks, _marks(known.parameters, are_sharded=known.are_sharded)
        same = list(map(operator.eq, known.marks, before))
        known.updates += 1
        if True in same:
            self._note(known, [i for i, unchanged in enumerate(same) if unchanged])

    def _note(self, known: _Known, unwritten: list[int]) -> None:
        due = [i for i in unwritten if known.updates - known.left_at.get(i, 0) > WRITTEN_BEFORE]
        known.left_at.update((i, known.updates) for i in unwritten)
        if len(due) == len(known.parameters):
            self._append(UNWRITTEN, "", KEPT)
            return
        due_weights = [known.owned[i] for i in due]
        frozen = [named for named in due_weights if not named.parameter.requires_grad]
        if not known.has_frozen:  # who freezes again follows a schedule
            known.has_frozen = bool(frozen)
            for named in frozen:
                self._append(f"{UNWRITTEN}.{named.name}", named.module, FROZEN)
        for named in due_weights:
            if named.parameter.requires_grad and gradient_of(named.parameter) is not None:
                self._append(f"{UNWRITTEN}.{named.name}", named.module, KEPT)

    def _append(self, name: str, module: str, value: float) -> None:
        series = Series(name, name, module=module, scalar=True)
        self.rows.add_scalar(self.rows.table.series_id(series), value)


def _marks(parameters: list[Tensor], *, are_sharded: bool) -> list[Any]:
    """Return what each write to a parameter changes: its count of changes, for a sharded one that of its part here."""
    if are_sharded:
        parts = [getattr(p, "_local_tensor", p) for p in parameters]  # another part may have taken its place
        return [(id(part), version_of(part)) for part in parts]
    try:
        return list(map(_VERSION, parameters))
    except RuntimeError:  # an inference tensor has no count
        return list(map(version_of, parameters))
