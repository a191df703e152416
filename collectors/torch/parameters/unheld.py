"""Finds parameters that have gradients and that no optimizer holds: a head or a tie that was replaced."""

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from torch import Tensor
from torch.optim import Optimizer

from trainsentry.collectors.series import REPLACED, UNHELD, UNHELD_UPDATES, UNWRITTEN, Series
from trainsentry.collectors.torch.hooks.compiler import has_compiled
from trainsentry.collectors.torch.parameters.gradient_reader import gradient_of
from trainsentry.collectors.torch.parameters.readers import parameters_of
from trainsentry.collectors.torch.rows.local_tensor import version_of
from trainsentry.collectors.torch.rows.step_rows import StepRows
from trainsentry.collectors.torch.sharding.local_shards import NamedParameter
from trainsentry.collectors.torch.sharding.model_names import ModelNames

SHARE_WITH_GRADIENT: Final = 0.5
"""Least share of those updates at which it must have had a gradient."""

SHOWN: Final = 4
"""Names in the warning."""

LOOK_EVERY: Final = 64
"""Updates between two looks at all parameters of the model, which take 5 ms for 5,000 modules: experts rest often."""


class UnheldParameters:
    """Appends `unwritten.<parameter>` for a parameter that has a gradient, that no optimizer holds and nothing writes.

    A backbone outside the optimizer may be meant, although it requires gradients. So there is a row only where an
    optimizer holds others, without a gradient, that are not in the model, where it holds nothing that has a gradient,
    or where the parameter came, or was thawed, after the first update; else `warn` is called with a sentence, once.
    Shards of wrappers and fp32 masters are held by their owners, and written where they are not; torch counts the
    writes, but not those through `data`.
    """

    def __init__(self, rows: StepRows, names: ModelNames, warn: Callable[[str, str], None] = lambda *_: None) -> None:
        self.rows = rows
        self.names = names
        self.warn = warn
        self._seen: list[NamedParameter] | None = None
        self._known: set[int] = set()  # the parameters that have required a gradient
        self._frozen: list[NamedParameter] = []
        self._told: set[str] = set()
        self._waiting: dict[int, tuple[NamedParameter, int | None, int]] = {}
        self._waited = 0
        self._has_begun = self._came_later = self._holds_others = False
        self._counted: weakref.ref[Optimizer] | None = None
        self._optimizers: Sequence[Optimizer] = ()
        self._left: dict[int, NamedParameter] = {}
        self._updates = self._look_at = 0

    def note_left(self, weights: Iterable[NamedParameter]) -> None:
        """Note the weights, without a gradient, that an update has just left unwritten."""
        self._left.update((id(n.parameter), n) for n in weights if n.fragment is None)
        self._tell_replaced()

    def note(self, optimizer: Optimizer, optimizers: Sequence[Optimizer]) -> None:
        """Look at the gradients of an update; call it at each, with all optimizers of the run.

        The updates of the first optimizer are counted, so that a step of several counts once.
        """
        if self._counted is None or self._counted() is None:
            self._counted = weakref.ref(optimizer)
        self._optimizers = optimizers
        if self._counted() is not optimizer or has_compiled():  # compiled updates count no writes
            return
        self._updates += 1
        if self._seen is not self.names.parameters:
            self._begin(optimizers)
        self._tell_replaced()
        if not self._waiting:
            if not self._updates % UNHELD_UPDATES and any(n.parameter.requires_grad for n in self._frozen):
                self._begin(optimizers)
            return
        self._waited += 1
        for key, (named, version, graded) in [*self._waiting.items()]:
            if version_of(named.parameter) != version:  # something updates it
                del self._waiting[key]
            elif gradient_of(named.parameter) is not None:
                self._waiting[key] = (named, version, graded + 1)
        if self._waited >= UNHELD_UPDATES:
            self._end(optimizers)

    def _tell_replaced(self) -> None:
        """Tell of the weights that are no longer in the model, where it has others, with gradients, in their place."""
        if not self._left or self._updates < self._look_at:
            return
        self._look_at, left, self._left = self._updates + LOOK_EVERY, self._left, {}
        now = {id(p): p for chunk in self.names.chunks for p in chunk.parameters()}
        held = _ids_of(self._optimizers)
        gone = [n for n in left.values() if id(n.own) not in now and gradient_of(n.parameter) is None]
        gone = [n for n in gone if id(n.parameter) in held]
        known = held | {id(n.own) for n in self.names.parameters}
        others = [p for key, p in now.items() if key not in known and gradient_of(p) is not None] if gone else []
        if set(map(id, others)) - _held_anywhere(others):
            self._append(gone, REPLACED)

    def _begin(self, optimizers: Sequence[Optimizer]) -> None:
        self._seen, self._waited = self.names.parameters, 0
        unheld = [n for n in _unheld(self._seen, optimizers) if id(n.parameter) not in self._known]
        self._came_later, self._has_begun = self._has_begun, True
        self._holds_others = bool(unheld) and _hold_others(self.names, optimizers)
        self._waiting = {id(n.parameter): (n, version_of(n.parameter), 0) for n in unheld}
        self._frozen = [n for n in self._seen if not n.parameter.requires_grad]
        self._known |= {id(n.parameter) for n in self._seen if n.parameter.requires_grad}

    def _end(self, optimizers: Sequence[Optimizer]) -> None:
        waiting, self._waiting = self._waiting, {}
        least = SHARE_WITH_GRADIENT * self._waited
        found = _unheld([n for n, _, graded in waiting.values() if graded >= least], optimizers)
        anywhere = _held_anywhere([n.parameter for n in found])
        found = [n for n in found if id(n.parameter) not in anywhere]
        if found and (self._came_later or (self._holds_others and _hold_others(self.names, optimizers))):
            self._append(found, UNHELD)
        elif found:
            shown = ", ".join(named.name for named in found[:SHOWN]) + ", …" * (len(found) > SHOWN)
            self.warn(
                "unheld parameters",
                f"no optimizer holds {shown} ({len(found)} in all), although gradients reach them: give them to one or "
                "set requires_grad to False, which saves these gradients.",
            )

    def _append(self, parameters: Iterable[NamedParameter], value: float) -> None:
        for named in parameters:
            name = f"{UNWRITTEN}.{named.name}"
            if name in self._told:
                continue
            self._told.add(name)
            series = Series(name, name, module=named.module, scalar=True)
            self.rows.add_scalar(self.rows.table.series_id(series), value)


def _ids_of(optimizers: Iterable[Optimizer]) -> set[int]:
    return {id(p) for optimizer in optimizers for p in parameters_of(optimizer)}


def _held_anywhere(parameters: Sequence[Tensor]) -> set[int]:
    """Return the ids of the parameters that any optimizer of the process holds, also one that nobody watches.

    Looks through all objects, which takes some 0.1 s, and only where something is to be told.
    """
    if not parameters:
        return set()
    optimizers = [each for each in gc.get_objects() if issubclass(type(each), Optimizer)]
    return {id(p) for p in parameters} & _ids_of(optimizers)


def _unheld(parameters: Iterable[NamedParameter], optimizers: Sequence[Optimizer]) -> list[NamedParameter]:
    """Return the trainable parameters that the model itself has and no optimizer."""
    held = _ids_of(optimizers)
    own = [n for n in parameters if n.owner is None and n.fragment is None]
    return [n for n in own if n.parameter.requires_grad and id(n.parameter) not in held]


def _hold_others(names: ModelNames, optimizers: Sequence[Optimizer]) -> bool:
    """Return whether optimizers hold parameters in place of the model's: strangers, or none that has a gradient."""
    held = [p for optimizer in optimizers for p in parameters_of(optimizer)]
    known = names.by_parameter()
    idle = [p for p in held if gradient_of(p) is None]
    return (0 < len(held) == len(idle)) or any(p.requires_grad and p not in known for p in idle)
