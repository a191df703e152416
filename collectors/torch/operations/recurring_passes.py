"""Recognises a pass that does what the pass before did, in half the time that it takes to list its operations.

The graph is walked in the same order. It is the same where each step of the walk meets a node of the same kind, made at
the same place in the order of operations, with the same constants.
"""

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, TypeVar

from trainsentry.collectors.torch.operations.node_constants import LARGE, Argument, Reader, arguments_of, is_plain

CAST: Final = "ToCopyBackward0"
"""The node of a cast, which is only counted: autocast makes many of them."""

_NOTHING, _LEAF, _OUTSIDE, _CAST_OUTSIDE = range(-1, -5, -1)
"""What the walk meets beside the nodes of the pass; a node of the pass is met as its number in it, from 0 on."""


Found = TypeVar("Found")


class Kind(NamedTuple):
    """A node's name, how its constants are read, and whether its class has that name alone."""

    name: str
    readers: list[Reader]
    is_own: bool


class _Visit(NamedTuple):
    """A node: its class, its name where others share that, and which outputs of its sources it takes.

    `plain` returns its constants as they are, which were `values`; `tensors` reads those that are tensors.
    """

    kind: type
    name: str
    outputs: list[int]
    plain: Callable[[Any], Any] | None
    values: Any
    tensors: list[Reader]
    arguments: tuple[tuple[str, Argument], ...]


@dataclass(frozen=True, slots=True)
class RecurringPass(Generic[Found]):
    """A pass that has come twice: its calls of modules, what the walk met, and what was `found` of it.

    `calls` are the modules, with the numbers at which each was entered and left, counted from the first. `met` has an
    element for each edge of the graph in the order of the walk, and `visits` one for each node.
    """

    calls: list[tuple[str, int, int]]
    met: list[int]
    visits: list[_Visit]
    found: Found
    casts: Counter[str]

    def is_again(self, calls: list[tuple[str, int, int]], roots: Sequence[Any], begin: int) -> bool:
        """Whether the graph behind `roots`, whose numbers begin with `begin`, is that of this pass again."""
        if calls != self.calls:
            return False
        waiting, visits = [*roots], iter(self.visits)
        seen: set[Any] = set()
        for expected in self.met:
            if not waiting:
                return False
            node = waiting.pop()
            if expected < 0:
                if _meets(node, begin) != expected:
                    return False
            elif node is None or node._sequence_nr() - begin != expected:
                return False
            elif node not in seen:
                seen.add(node)
                sources = node.next_functions
                if not _is_like(node, sources, next(visits)):
                    return False
                waiting += [source for source, _ in sources]
        return not waiting


def recurring(
    calls: list[tuple[str, int, int]],
    roots: Sequence[Any],
    begin: int,
    kind_of: Callable[[Any], Kind],
    found: Found,
    casts: Counter[str],
) -> RecurringPass[Found] | None:
    """Return a pass to be recognised when it comes again; None for one with a cast that was made before it."""
    met, visits = [], []
    for code, visit in _walk(roots, begin, kind_of):
        met.append(code)
        if visit is not None:
            visits.append(visit)
    return None if _CAST_OUTSIDE in met else RecurringPass(calls, met, visits, found, casts)


def _walk(roots: Sequence[Any], begin: int, kind_of: Callable[[Any], Kind]) -> Iterator[tuple[int, _Visit | None]]:
    """Yield what the walk meets, and of a node of the pass what `is_again` compares at its first visit."""
    waiting = [*roots]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        code = _meets(node, begin)
        if code < 0 or node in seen:
            yield code, None
            continue
        seen.add(node)
        sources = node.next_functions
        yield code, _visit(node, sources, kind_of(node))
        waiting += [source for source, _ in sources]


def _visit(node: Any, sources: Sequence[tuple[Any, int]], kind: Kind) -> _Visit:
    tensors = [reader for reader in kind.readers if reader[2]]
    attributes = [
        attribute for _, attribute, is_tensor in kind.readers if not is_tensor and is_plain(getattr(node, attribute))
    ]
    plain = operator.attrgetter(*attributes) if attributes else None
    return _Visit(
        type(node),
        "" if kind.is_own else kind.name,
        [output for _, output in sources],
        plain,
        None if plain is None else plain(node),
        tensors,
        arguments_of(node, tensors, sources),
    )


def _meets(node: Any, begin: int) -> int:
    """Return the number of a node of the pass in it, or what the walk meets instead."""
    if node is None:
        return _NOTHING
    number: int = node._sequence_nr()
    if begin <= number < LARGE:
        return number - begin
    if node.name() == CAST:
        return _CAST_OUTSIDE
    return _LEAF if number >= LARGE else _OUTSIDE


def _is_like(node: Any, sources: Sequence[tuple[Any, int]], before: _Visit) -> bool:
    """Whether a node computes what one of the pass before did."""
    kind, name, outputs, plain, values, tensors, arguments = before
    return (
        (not name or node.name() == name)
        and type(node) is kind
        and [output for _, output in sources] == outputs
        and (plain is None or plain(node) == values)
        and (not tensors or arguments_of(node, tensors, sources) == arguments)
    )
