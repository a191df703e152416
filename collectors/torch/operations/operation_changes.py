"""Compares the operations of a module's forward pass with those of its passes before: code, or a constant, was changed.

What a module computes does not change while it trains, unless somebody changes it: the operations and their sources
are the same in each pass, and so are constants such as a scale, an epsilon, an axis and the pattern of a mask. What has
been the same in all passes so far and is another now has a row of its own, once. What varies from pass to pass (layers
that are dropped, annealed numbers, lengths of sequences) varies early, or goes back, and has none.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor

from trainsentry.collectors.guard import Guard
from trainsentry.collectors.series import (
    MOVED_ARGUMENT,
    OPERATIONS,
    OTHER_ARGUMENT,
    OTHER_OPERATIONS,
    PASSING,
    Series,
)
from trainsentry.collectors.shared.model_graph import NamedModule
from trainsentry.collectors.statistics import VALUE
from trainsentry.collectors.torch.operations.node_constants import OTHER, TABLES, Argument, change_shown, is_reordered
from trainsentry.collectors.torch.operations.pass_operations import NUMBERS_NODES, Operation, PassOperations
from trainsentry.collectors.torch.operations.pass_shapes import PassShapes, Shapes
from trainsentry.collectors.torch.passes.pass_forms import switches_of
from trainsentry.collectors.torch.rows.step_rows import StepRows

PART: Final = "operations"
"""The part of the monitor that a failure here switches off."""

SEEN: Final = 5
"""Passes in which a constant or the operations were the same before another counts; as many again for each time that it
was another since the run began: the sum of a mask of padding is the same for five batches by chance."""

SEEN_FOR_FEWER: Final = 8
"""The same where operations are only left out, or only added: layers drop out at random, and experts get no token."""

SEEN_FOR_ORDER: Final = 40
"""The same for a table whose elements only change places: programs shuffle, and move the weights that they keep, every
so often."""

LASTS: Final = 2
"""Passes that a change must last: some batches take another branch, as those without an object to find."""

LASTS_FOR_FEWER: Final = 4
"""The same for fewer or more operations, and for another mask: a batch without padding is no exception."""

JUMP: Final = math.log(1.2)
"""Change of a number, |log ratio|, from which it is no step of a schedule."""

SIZES: Final = frozenset({"start", "end", "length", "split_size"})
NO_BOUND: Final = 2.0**31
SEEN_OF_SIZES: Final = 16
"""Names of constants that may be sizes of the data, what bounds none, and the passes alike that such a size needs: of
the sequences in a packed batch, one or two have the greatest length."""

DROPOUTS: Final = frozenset({"p", "dropout_p"})
"""Names of the share that a dropout sets to zero."""

MANY: Final = 3
"""Modules whose casts change at once where autocast is switched."""

CHECKPOINT: Final = "CheckpointFunction"
"""How the node of a reentrant checkpoint is named."""

MOST_TOLD: Final = 100
"""Changes of a run that have a row, a bound on series."""

MOST_TOO_LARGE: Final = 3
"""Passes in a row with too many operations, after which a module is listed no more: to find out takes 40 ms."""

MOST_SHOWN: Final = 3
"""Kinds of operations that a text names on each side."""


_Change = tuple[str, str, float, int]
"""A module, its change as text, the kind of it, and the passes that it has lasted."""


@dataclass(slots=True)
class _Held:
    """A value that is the same in each pass, since pass `since`; `new` is another one that has come `lasted` times."""

    usual: Any
    since: int
    new: Any = None
    lasted: int = 0
    varies: bool = False
    changes: int = 0

    def take(self, value: Any, number: int, seen: int, lasts: int) -> bool:
        """Take in the value of pass `number`; return whether it is another now, after `seen` passes alike.

        One that has had other values needs as many passes again for each change. After `lasts` such passes it `varies`,
        and is another no more.
        """
        if self.varies:
            return False
        if value == self.usual:
            self.varies = self.lasted > 0  # it came and went
            return False
        if number - self.since < seen * (1 + self.changes):
            self.usual, self.since, self.lasted, self.changes = value, number, 0, self.changes + 1
            return False
        if self.lasted and not _are_alike(self.usual, self.new, value):
            self.varies = True
            return False
        self.new, self.lasted = value, self.lasted + 1
        self.varies = self.lasted == lasts
        return True


@dataclass(slots=True)
class _Module:
    """What is known of a module's passes: its structure, and its constants by place."""

    structure: _Held
    casts: _Held
    arguments: tuple[Any, ...] = ()
    held: dict[tuple[int, str], _Held] = field(default_factory=dict)

    @property
    def is_changing(self) -> bool:
        """Whether a change has come that may last, or go."""
        of_each = self.structure, self.casts, *self.held.values()
        return any(held.lasted and not held.varies for held in of_each)


@dataclass(slots=True)
class _Passes:
    """What is known of the passes through an outermost module: their number, the last one's inputs, and its modules.

    `settled` are the operations of the last pass where nothing in it was about to change: the same ones again, under
    the same conditions, change nothing.
    """

    number: int = 0
    shapes: PassShapes = field(default_factory=PassShapes)
    condition: Any = None
    called: frozenset[str] = frozenset()
    modules: dict[str, _Module] = field(default_factory=dict)
    settled: Any = None

    def take(
        self, shapes: Shapes, condition: Any, found: Mapping[str, list[Operation]], casts: Mapping[str, int]
    ) -> Iterator[_Change]:
        """Take in a pass; yield what its modules do otherwise than before."""
        if found is self.settled and shapes == self.shapes.last and condition == self.condition:
            self.number += 1
            return
        self.settled = None
        called, same_condition = frozenset(found), condition == self.condition
        same_calls = called == self.called
        self.number, self.condition, self.called = self.number + 1, condition, called
        self.shapes.take(shapes, self.number)
        recast = [m for m, known in self.modules.items() if m in found and casts.get(m, 0) != known.casts.usual]
        for module, operations in found.items():
            known = self.modules.get(module)
            if known is None or not same_condition:
                self.modules[module] = _module_of(operations, casts.get(module, 0), self.number, known)
                continue
            yield from self._changed_casts(module, known.casts, casts.get(module, 0), is_common=len(recast) >= MANY)
            for text, kind, lasted in _changes(known, operations, self.number, self.shapes, same_calls=same_calls):
                yield module, text, kind, lasted
        if not any(known.is_changing for known in self.modules.values()):
            self.settled = found

    def _changed_casts(self, module: str, held: _Held, casts: int, *, is_common: bool) -> Iterator[_Change]:
        """Yield that a module alone casts more or fewer tensors than before; autocast makes many modules do so."""
        usual = held.usual
        if is_common and casts != usual:
            held.usual, held.since, held.lasted = casts, self.number, 0
        elif held.take(casts, self.number, SEEN, LASTS):
            yield module, f"number of casts: {usual} → {casts}", OTHER_ARGUMENT if held.varies else PASSING, held.lasted


class OperationChanges:
    """Appends a row `operations.<module>: <change>` when a module's forward pass computes something else than before.

    The row's statistics hold the number of passes that the change has lasted, and its value says of which kind it is.
    One pass of each outermost module in a step is read, where gradients are enabled and no mode is active that changes
    operations. Where a module of it was switched between training and evaluation, another number of parameters is
    trained, or autocast was switched, what changes with it is taken as it is. Where other modules are called than in
    the pass before, other operations have no row.
    """

    def __init__(self, rows: StepRows, guard: Guard, *, enabled: bool) -> None:
        self.rows = rows
        self.guard = guard
        self.enabled = enabled and NUMBERS_NODES
        self._pass = PassOperations()
        self._reading = False
        self._root: NamedModule | None = None
        self._shapes: Shapes = ()
        self._passes: defaultdict[tuple[str, int], _Passes] = defaultdict(_Passes)
        self._too_large: Counter[tuple[str, int]] = Counter()
        self._told = 0

    def begin(self, named: NamedModule, inputs: Iterable[tuple[str, Tensor]], *, reading: bool) -> None:
        """Note that an outermost module is entered; its pass is read if `reading`."""
        self._reading = self.enabled and reading and self._too_large[named.name, named.vpp_stage] < MOST_TOO_LARGE
        if self._reading:
            self._root, self._shapes = named, tuple(tuple(x.shape) for _, x in inputs)
            self._pass.begin()

    def enter(self, named: NamedModule) -> None:
        """Note that a module is entered."""
        if self._reading:
            self._pass.enter(named.name)

    def leave(self, outputs: Iterable[tuple[str, Tensor]]) -> None:
        """Note that a module is left; compare the operations of the pass if it was the outermost one."""
        if self._reading and self._pass.leave() and self._root is not None:
            self._reading = False
            self.guard.run(PART, self._take_pass, self._root, outputs)

    def steady(self, passes: int) -> Iterator[tuple[str, str]]:
        """Yield the modules whose operations are known, and have been the same for so many passes, with their names.

        The kinds of attention, of which torch takes one by device and size, count as one. Functions that a program
        or a wrapper such as FSDP2 adds are left out: only the names of torch's own nodes end in a digit.
        """
        for known in self._passes.values():
            for module, of_module in known.modules.items():
                held = of_module.structure
                is_steady = not (held.varies or held.lasted or held.changes) and known.number - held.since >= passes
                if is_steady and held.usual and not _is_checkpoint(held.usual):
                    own = [_name(name).partition("_product")[0] for name, _ in held.usual if name[-1:].isdigit()]
                    names = Counter(own)
                    yield module, ", ".join(f"{name} {count}" for name, count in sorted(names.items()))

    def _take_pass(self, root: NamedModule, outputs: Iterable[tuple[str, Tensor]]) -> None:
        found = self._pass.read(tensor for _, tensor in outputs)
        if found is None:
            self._too_large[root.name, root.vpp_stage] += 1
        elif found:
            self._too_large[root.name, root.vpp_stage] = 0
            passes = self._passes[root.name, root.vpp_stage]
            for change in passes.take(self._shapes, switches_of(root.module), found, self._pass.casts):
                self._append(root, *change)

    def _append(self, root: NamedModule, module: str, text: str, kind: float, lasted: int) -> None:
        if self._told >= MOST_TOLD:
            return
        self._told += 1
        name = f"{OPERATIONS}.{module or 'model'}: {text}"
        series = Series(name, name, module=module, vpp_stage=root.vpp_stage, scalar=True)
        self.rows.add_numbers(self.rows.table.series_id(series), [lasted] * VALUE + [kind])


def _structure_of(operations: list[Operation]) -> tuple[Any, ...]:
    return tuple((operation.name, operation.sources) for operation in operations)


def _module_of(operations: list[Operation], casts: int, number: int, before: _Module | None) -> _Module:
    """Return what is known of a module after one pass; what varied before varies still."""
    held = _Held(_structure_of(operations), number, varies=before is not None and before.structure.varies)
    return _Module(held, _Held(casts, number), tuple(operation.arguments for operation in operations))


def _changes(
    known: _Module, operations: list[Operation], number: int, shapes: PassShapes, *, same_calls: bool
) -> Iterator[tuple[str, float, int]]:
    """Yield what a module does otherwise than before: as text, its kind, and the passes that it has lasted.

    What depends on the shape of the inputs may be another with it, and operations where other modules are called, as
    where layers are dropped.
    """
    structure, held = _structure_of(operations), known.structure
    arguments = tuple(operation.arguments for operation in operations)
    if not structure:
        return  # nothing of it leads to the output, or it runs without a graph, as inside a checkpoint
    if structure != held.usual and (not held.usual or _is_checkpoint(structure) != _is_checkpoint(held.usual)):
        known.structure, known.arguments, known.held = _Held(structure, number, varies=held.varies), arguments, {}
        return
    if structure != held.usual or held.lasted:
        was = held.usual
        held.varies |= structure != was and not (same_calls and shapes.fit(held.since))
        seen, lasts = _enough_for(was, structure)
        if held.take(structure, number, seen, shapes.least_lasting(lasts)):
            kind = OTHER_OPERATIONS if held.varies else PASSING
            yield f"operations: {_text_of_structure(was, structure)}", kind, held.lasted
        if held.usual != was:
            known.arguments, known.held = arguments, {}
    if structure == held.usual:
        yield from _changed_arguments(known, operations, arguments, number, shapes)


def _changed_arguments(
    known: _Module, operations: list[Operation], arguments: tuple[Any, ...], number: int, shapes: PassShapes
) -> Iterator[tuple[str, float, int]]:
    """Yield the constants of a module's operations that are others than before, in the same way."""
    before, known.arguments = known.arguments, arguments
    waiting = {place for place, held in known.held.items() if held.lasted and not held.varies}
    if arguments == before and not waiting:
        return
    for at, (now, was) in enumerate(zip(arguments, before, strict=True)):
        values = dict(was)
        for key, value in now:
            place = at, key
            if key not in values or (value == values[key] and place not in waiting):
                continue
            held = known.held.setdefault(place, _Held(values[key], known.structure.since))
            usual = held.usual
            held.varies |= value != usual and not shapes.fit(held.since)
            seen, lasts = _enough_for_argument(key, usual, value)
            if held.take(value, number, seen, shapes.least_lasting(lasts)):
                kind = _kind_of(key, usual, value) if held.varies else PASSING
                text = f"{'factor' if key == OTHER else key} of {_name(operations[at].name)}"
                yield f"{text}: {change_shown(key, usual, value)}", kind, held.lasted


def _is_checkpoint(structure: tuple[Any, ...]) -> bool:
    """Whether a module runs parts of itself without a graph, to run them again in the backward pass."""
    return any(name.startswith(CHECKPOINT) for name, _ in structure)


def _enough_for(was: tuple[Any, ...], now: tuple[Any, ...]) -> tuple[int, int]:
    """Return the passes that operations must have been the same before, and how many others must last."""
    lost, gained = _differences(was, now)
    return (SEEN, LASTS) if bool(lost) == bool(gained) else (SEEN_FOR_FEWER, LASTS_FOR_FEWER)


def _differences(was: tuple[Any, ...], now: tuple[Any, ...]) -> tuple[Counter[str], Counter[str]]:
    """Return how many operations of each name are lost and gained."""
    before, after = Counter(name for name, _ in was), Counter(name for name, _ in now)
    return before - after, after - before


def _text_of_structure(was: tuple[Any, ...], now: tuple[Any, ...]) -> str:
    lost, gained = _differences(was, now)
    parts = [
        f"{word} {', '.join(_name(name) for name, _ in names.most_common(MOST_SHOWN))}"
        for word, names in (("with", gained), ("without", lost))
        if names
    ]
    if not parts:
        other = next((_name(new[0]) for old, new in zip(was, now, strict=True) if old != new), "")
        return f"{other} of other inputs" if [n for n, _ in was] == [n for n, _ in now] else "in another order"
    return ", ".join(parts)


def _kind_of(key: str, was: Argument, now: Argument) -> float:
    """Return whether a constant has jumped or only moved; dropouts have schedules, which `setting` tells of."""
    if key in DROPOUTS:
        return MOVED_ARGUMENT
    is_number = isinstance(was, float) and isinstance(now, float)
    return OTHER_ARGUMENT if not is_number or _has_jumped(was, now) else MOVED_ARGUMENT


def _are_alike(usual: Any, first: Any, second: Any) -> bool:
    """Whether two values differ from the usual one alike: they are equal, or numbers that jumped the same way."""
    if first == second:
        return True
    return _has_jumped(usual, first) and _has_jumped(usual, second) and (first > usual) == (second > usual)


def _has_jumped(was: Any, now: Any) -> bool:
    """Whether a number is another by more than a step of a schedule; from and to 0, things are faded in and out."""
    if not (isinstance(was, float) and isinstance(now, float)) or was == 0.0 or now == 0.0:
        return False
    return now / was <= 0 or abs(math.log(now / was)) > JUMP


def _name(node: str) -> str:
    """Return the name of a node's operation.

    >>> _name("NativeLayerNormBackward0")
    'native_layer_norm'
    """
    node = node.rpartition("::")[2]  # torch::autograd::CopySlices
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", re.sub(r"Backward\d*$", "", node)).lower()


def _enough_for_argument(key: str, was: Argument, now: Argument) -> tuple[int, int]:
    """Return the passes that a constant must have been the same before, and how many another one must last."""
    if key in SIZES and all(isinstance(size, (int, float)) and 0 < size < NO_BOUND for size in (was, now)):
        return SEEN_OF_SIZES, LASTS_FOR_FEWER
    if is_reordered(key, was, now):
        return SEEN_FOR_ORDER, LASTS_FOR_FEWER
    return SEEN, LASTS_FOR_FEWER if isinstance(now, tuple) and key in TABLES else LASTS
