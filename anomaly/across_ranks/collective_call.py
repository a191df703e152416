"""A collective call as its ranks saw it, merged from their reports; its size does not grow with the ranks."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

MOST_NAMED: Final = 8
"""Ranks kept by number among those with equal reports: enough to know where to look."""

MOST_OUTPUTS: Final = 16
"""Different outputs kept, and different inputs of a broadcast: ranks of one all_reduce end with equal bits."""

COPIED: Final = 1e-9
"""Relative difference of two sums of the same numbers, added up in float64 in another order."""

COPIED_IN_FLOAT32: Final = 2.0**-19
"""The same in float32, on devices without float64: 16 roundings, of sums in blocks and in trees."""


@dataclass(frozen=True)
class Sums:
    """The tensors on one side of a call: the sum of all elements, their norm, how many there are.

    `copied` is the relative difference of two such sums of the same numbers: COPIED or COPIED_IN_FLOAT32.
    """

    total: float
    norm: float
    numel: int
    finite: bool
    dtype: str
    copied: float = COPIED

    @classmethod
    def of(cls, parts: Sequence["Sums"]) -> "Sums":
        """Return the sums of several tensors together."""
        norm = math.sqrt(sum(p.norm * p.norm for p in parts))  # infinite where a power would raise
        finite, dtype = all(p.finite for p in parts), parts[0].dtype if parts else ""
        copied = max((p.copied for p in parts), default=COPIED)
        return cls(sum(p.total for p in parts), norm, sum(p.numel for p in parts), finite, dtype, copied)

    @property
    def slack(self) -> float:
        """The largest difference between this sum and that of the same numbers on another rank."""
        return self.copied * self.norm * math.sqrt(max(self.numel, 1))


@dataclass(frozen=True)
class Output:
    """Ranks with equal outputs: the sum of all elements, and the first of these ranks with their order in a record."""

    total: float
    finite: bool
    places: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Asked:
    """The number of ranks that ask for a reduction (1 sum, 2 average, 0 another, -1 unknown), and the first of them."""

    reduction: int
    count: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class CollectiveCall:
    """One collective call, as `ranks` of its ranks saw it.

    `put_in` are the inputs and `got` the outputs of all of them. `norms` is the sum of the ranks' input norms and
    `longest` the largest number of elements of an input; `sources` are different inputs of a broadcast, first those
    that a rank here has as output; `sizes` are the different pairs of elements and dtype of the inputs.
    """

    name: str
    op: str
    ranks: int
    first: int
    put_in: Sums
    norms: float
    longest: int
    sizes: tuple[tuple[int, str], ...]
    sources: tuple[Sums, ...]
    got: Sums
    outputs: tuple[Output, ...]
    asked: tuple[Asked, ...]

    @property
    def reduction(self) -> int:
        """The reduction that most ranks asked for; of several, that of the lowest rank."""
        return max(self.asked, key=lambda a: (a.count, -a.ranks[0])).reduction

    def asking_for(self, reduction: int) -> "CollectiveCall":
        """Return the call as if all had asked for one reduction."""
        ranks = sorted(r for a in self.asked for r in a.ranks)[:MOST_NAMED]
        return replace(self, asked=(Asked(reduction, self.ranks, tuple(ranks)),))

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "CollectiveCall":
        """Rebuild a call from plain data.

        Raises:
            TypeError, KeyError: when it is no call.

        """
        return cls(
            **{
                **data,
                "put_in": Sums(**data["put_in"]),
                "sizes": tuple((n, dtype) for n, dtype in data["sizes"]),
                "sources": tuple(Sums(**s) for s in data["sources"]),
                "got": Sums(**data["got"]),
                "outputs": tuple(
                    Output(o["total"], o["finite"], tuple((r, order) for r, order in o["places"]))
                    for o in data["outputs"]
                ),
                "asked": tuple(Asked(a["reduction"], a["count"], tuple(a["ranks"])) for a in data["asked"]),
            }
        )


def seen_by(
    rank: int, name: str, op: str, sides: tuple[Sums, Sums], order: int = 0, reduction: int = 0
) -> CollectiveCall:
    """Return a call as one rank saw it: `sides` are its input and its output."""
    put_in, got = sides
    return CollectiveCall(
        name=name,
        op=op,
        ranks=1,
        first=rank,
        put_in=put_in,
        norms=put_in.norm,
        longest=put_in.numel,
        sizes=((put_in.numel, put_in.dtype),),
        sources=(put_in,) if op == "broadcast" else (),
        got=got,
        outputs=(Output(got.total, got.finite, ((rank, order),)),),
        asked=(Asked(reduction, 1, (rank,)),),
    )


def put_together(parts: Sequence[CollectiveCall]) -> CollectiveCall:
    """Return one call merged from several parts of it; no rank is in two of them."""
    parts = sorted(parts, key=lambda part: part.first)
    outputs = _distinct([o for p in parts for o in p.outputs])
    return replace(
        parts[0],
        ranks=sum(p.ranks for p in parts),
        put_in=Sums.of([p.put_in for p in parts]),
        norms=sum(p.norms for p in parts),
        longest=max(p.longest for p in parts),
        sizes=tuple(sorted({size for p in parts for size in p.sizes})[:MOST_OUTPUTS]),
        sources=_likely([s for p in parts for s in p.sources], outputs),
        got=Sums.of([p.got for p in parts]),
        outputs=outputs,
        asked=_counted([a for p in parts for a in p.asked]),
    )


def _likely(sources: Sequence[Sums], outputs: Sequence[Output]) -> tuple[Sums, ...]:
    """Return some of the different inputs of a broadcast, first those that are outputs: the sender keeps its input."""
    different = dict.fromkeys(sources)
    got = sorted(different, key=lambda s: all(abs(o.total - s.total) > s.slack for o in outputs))
    return tuple(got[:MOST_OUTPUTS])


def _distinct(outputs: Sequence[Output]) -> tuple[Output, ...]:
    """Merge the ranks with equal outputs; of too many different ones keep the farthest apart."""
    same: dict[tuple[float, bool], list[tuple[int, int]]] = {}
    for output in outputs:
        same.setdefault((output.total, output.finite), []).extend(output.places)
    found = [Output(*key, tuple(sorted(places)[:MOST_NAMED])) for key, places in same.items()]
    if len(found) <= MOST_OUTPUTS:
        return tuple(found)
    found.sort(key=lambda o: o.total if o.finite else -math.inf)
    return tuple(found[: MOST_OUTPUTS // 2] + found[-MOST_OUTPUTS // 2 :])


def _counted(asked: Sequence[Asked]) -> tuple[Asked, ...]:
    found: dict[int, Asked] = {}
    for part in asked:
        so_far = found.get(part.reduction, Asked(part.reduction, 0, ()))
        ranks = tuple(sorted(so_far.ranks + part.ranks)[:MOST_NAMED])
        found[part.reduction] = Asked(part.reduction, so_far.count + part.count, ranks)
    return tuple(found.values())
