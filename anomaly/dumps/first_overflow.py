"""Finds the first NaN or Inf in the dumps of one step of many ranks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

COLLECTIVE: Final = "Distributed."
"""The prefix of the names of collectives."""


class DumpOfRank(Protocol):
    """A dump; see `exporters.dump_reader.RankDump`."""

    @property
    def rank(self) -> int:
        """The rank that wrote it."""

    @property
    def parents(self) -> dict[str, str | None]:
        """The tree of all calls, in the order they began; may be empty."""

    @property
    def calls(self) -> dict[str, Any]:
        """The calls, in the order they ended."""

    def tensors(self, call: str) -> list[Any]:
        """The tensors of a call."""


@dataclass(frozen=True)
class FirstOverflow:
    """The first call of a rank whose results hold NaN or Inf.

    `made`: none of its inputs did. `collectives` counts the collectives that the rank had begun before.
    `from_ranks` are the ranks whose input of a collective brought it here.
    """

    rank: int
    call: str
    made: bool
    collectives: int
    places: tuple[str, ...]
    from_ranks: tuple[int, ...] = field(default=())


def first_overflows(dumps: Sequence[DumpOfRank]) -> list[FirstOverflow]:
    """Return the first overflow of each rank that has one, the earliest first.

    Collectives order the calls of all ranks: a call before the n-th collective on one rank precedes every call after it
    on any other. A rank whose collective outputs NaN or Inf from a finite input has it from other ranks, which come
    first.
    """
    found = [o for o in map(_first_of, dumps) if o is not None]
    by_rank = {o.rank: o for o in found}
    resolved = [_with_senders(o, by_rank) for o in found]
    return sorted(resolved, key=lambda o: (bool(o.from_ranks), o.collectives, not o.made, o.rank))


def _first_of(dump: DumpOfRank) -> FirstOverflow | None:
    before = _collectives_before(dump)
    for call in dump.calls:
        judged = "overflow" in dump.calls[call]  # by the overflow check, as it happened
        out = [t for t in dump.tensors(call) if _is_result(call, t.place) and (judged or is_bad(t.facts))]
        if out:
            collectives = before.get(call, 0)
            into = any(is_bad(t.facts) for t in dump.tensors(call) if t.place.startswith("input"))
            made = dump.calls[call].get("overflow", "passed_on" if into else "made") == "made"
            return FirstOverflow(dump.rank, call, made, collectives, tuple(t.place for t in out))
    return None


def _collectives_before(dump: DumpOfRank) -> dict[str, int]:
    """Return the number of collectives before each call; the tree also has calls that a dump leaves out."""
    found: dict[str, int] = {}
    count = 0
    for call in dump.parents or dump.calls:
        found[call] = count
        count += call.startswith(COLLECTIVE)
    return found


def _with_senders(overflow: FirstOverflow, others: Mapping[int, FirstOverflow]) -> FirstOverflow:
    """Add the ranks that an overflow came from, if a collective brought it."""
    if not (overflow.call.startswith(COLLECTIVE) and overflow.made):
        return overflow
    earlier = [
        o.rank
        for o in others.values()
        if o.rank != overflow.rank and o.collectives <= overflow.collectives and not o.call.startswith(COLLECTIVE)
    ]
    return FirstOverflow(
        overflow.rank, overflow.call, False, overflow.collectives, overflow.places, tuple(sorted(earlier))
    )


def _is_result(call: str, place: str) -> bool:
    return place.startswith("output") or ".parameters_grad." in call


def is_bad(facts: Mapping[str, Any]) -> bool:
    """Whether a tensor's facts show NaN or Inf; masks of −Inf do not count.

    >>> is_bad({"Max": 0.0, "Min": -math.inf}), is_bad({"Max": math.nan, "Min": math.nan})
    (False, True)
    """
    high, low = facts.get("Max"), facts.get("Min")
    if not isinstance(high, (int, float)) or not isinstance(low, (int, float)):
        return False
    return math.isnan(high) or high == math.inf or (math.isinf(low) and not math.isfinite(high))
