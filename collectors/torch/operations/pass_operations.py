"""Lists the operations of each module's forward pass, from the graph that autograd keeps for the backward pass.

The graph is there anyway: names, constants and sources of its nodes are read, and no values of activations. Of masks
and constant tables in host memory, if they are small, the elements are counted or summed. Nodes are numbered in the
order of their operations, so the numbers at which a module was entered and left tell which operations are its own.
"""

import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from trainsentry.collectors.torch.operations.node_constants import LARGE, Argument, arguments_of, readers_of
from trainsentry.collectors.torch.operations.recurring_passes import CAST, Kind, RecurringPass, recurring

MOST_OPERATIONS: Final = 20_000
"""Operations of a pass that are listed; a pass of more is left out, as it would take 0.1 s."""

MOST_CALLS: Final = 5_000
"""Calls of modules in a pass; a cell that is called for each token makes more."""

NUMBERS_NODES: Final = hasattr(torch._C._autograd, "_get_sequence_nr")
"""Whether this torch tells the number that the next node gets; where it does not, nothing is listed."""


class Operation(NamedTuple):
    """An operation: its node's name, where its inputs come from, and its constants by name.

    A source is the distance to an operation of the same module, such as -1, or the name of a sub-module, `weight` for a
    leaf of the graph, `input` for what comes from outside of the module, and `-` for what needs no gradient.
    """

    name: str
    sources: tuple[str | int, ...]
    arguments: tuple[tuple[str, Argument], ...]


class _Call(NamedTuple):
    module: str
    begin: int
    end: list[int]


class PassOperations:
    """Notes when modules are entered and left in a pass, and lists their operations at its end."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._open: list[_Call] = []
        self._thread = 0
        self.casts: Counter[str] = Counter()
        self._kinds: dict[type, Kind] = {}
        self._last: dict[str, tuple[list[tuple[str, int, int]], Any]] = {}
        self._recurring: dict[str, RecurringPass[dict[str, list[Operation]]]] = {}

    def begin(self) -> None:
        """Begin a pass; one that raised may have left modules entered."""
        self._calls.clear()
        self._open.clear()
        self._thread = threading.get_ident()

    def enter(self, module: str) -> None:
        """Note that a module is entered."""
        if self._thread != threading.get_ident():  # a replica of DataParallel: its nodes have numbers of their own
            self._thread = 0
        elif len(self._calls) < MOST_CALLS:
            call = _Call(module, torch._C._autograd._get_sequence_nr(), [])
            self._calls.append(call)
            self._open.append(call)
        else:
            self._thread = 0

    def leave(self) -> bool:
        """Note that the module entered last is left; return whether it was the outermost one."""
        if self._thread != threading.get_ident() or not self._open:
            return False
        self._open.pop().end.append(torch._C._autograd._get_sequence_nr())
        return not self._open

    def read(self, outputs: Iterable[Tensor]) -> dict[str, list[Operation]] | None:
        """Return the operations of each module that was called, in their order; None where they are too many.

        `casts` counts those of each module, which are not among them. From the third time on, a pass that is as the
        last one has the same object.
        """
        if not self._calls:
            return None
        (root, begin, _), roots = self._calls[0], [output.grad_fn for output in outputs]
        calls = [(name, start - begin, end[0] - begin if end else -1) for name, start, end in self._calls]
        known = self._recurring.get(root)
        if known is not None and known.is_again(calls, roots, begin):
            self.casts = known.casts
            return known.found
        self._recurring.pop(root, None)
        found = self._listed(roots, begin)
        if found is not None and self._last.get(root) == (calls, found):
            again = recurring(calls, roots, begin, self._kind, found, self.casts)
            self._recurring |= {root: again} if again is not None else {}
        self._last[root] = calls, found
        return found

    def _listed(self, roots: list[Any], begin: int) -> dict[str, list[Operation]] | None:
        self.casts = Counter()
        nodes = _nodes_behind(roots, begin)
        if nodes is None:
            return None
        ordered = sorted(nodes.items(), key=_number_of)
        found: dict[str, list[Operation]] = {call.module: [] for call in self._calls}
        places: dict[Any, tuple[str, int]] = {}
        owners = self._owners([number for _, (number, _) in ordered])
        for (node, (_, sources)), module in zip(ordered, owners, strict=True):
            name, readers, _ = self._kind(node)
            if name == CAST:
                self.casts[module] += 1
                continue
            own = found[module]
            place = len(own)
            places[node] = module, place
            of = tuple([_source(source, number, places, module, place) for source, number in sources])
            constants = arguments_of(node, readers, sources) if readers else ()
            own.append(Operation(name, of, constants))
        return found

    def _kind(self, node: Any) -> Kind:
        kind = type(node)
        known = self._kinds.get(kind)
        if known is None:
            name = node.name()
            known = Kind(name, readers_of(kind), name == kind.__name__)
            if known.is_own:  # else kinds without a class of their own share one
                self._kinds[kind] = known
        return known

    def _owners(self, numbers: list[int]) -> list[str]:
        """Return the innermost module whose call made each node; calls are in the order in which they began."""
        owners, running, waiting = [], [], iter(self._calls)
        following = next(waiting, None)
        for number in numbers:
            while following is not None and following.begin <= number:
                running.append(following)
                following = next(waiting, None)
            while len(running) > 1 and running[-1].end and running[-1].end[0] <= number:
                running.pop()
            owners.append(running[-1].module)
        return owners


def _number_of(item: tuple[Any, tuple[int, Any]]) -> int:
    return item[1][0]


def _nodes_behind(roots: list[Any], begin: int) -> dict[Any, tuple[int, Any]] | None:
    """Return the nodes of a pass with their numbers and sources; None where they are too many."""
    found: dict[Any, tuple[int, Any]] = {}
    waiting = [*roots]
    while waiting:
        node = waiting.pop()
        if node is None or node in found:
            continue
        number = node._sequence_nr()
        if begin <= number < LARGE:
            found[node] = number, (sources := node.next_functions)
            waiting += [source for source, _ in sources]
            if len(found) > MOST_OPERATIONS:
                return None
    return found


def _source(source: Any, number: int, places: dict[Any, tuple[str, int]], module: str, place: int) -> str | int:
    known = places.get(source)
    if known is None:
        if source is None:
            return "-"
        if source.name() == CAST:
            cast, number = source.next_functions[0]
            return _source(cast, number, places, module, place)
        return "weight" if source._sequence_nr() >= LARGE else "input"
    owner, at = known
    name: str | int
    if owner == module:
        name = at - place
    elif not module or owner.startswith(f"{module}."):
        name = (owner[len(module) + 1 :] if module else owner).partition(".")[0]
    else:
        return "input"
    return f"{name}.{number}" if number else name
