"""What became of the open list: found, named rightly and when, by family of faults and of models.

Of the families of `UNSEEN` only sums are given.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import work
from families import FAMILIES, UNSEEN

Outcomes = list[dict[str, Any]]


@dataclass(frozen=True)
class Share:
    """Sums over runs: `found` within their bound, `right` with the culprit as first suspect, both of `runs`.

    `delay` is the median of those found, in steps; `early` counts incidents before the fault; `failed` runs ended in an
    error and count nowhere else.
    """

    runs: int
    found: int
    right: int
    delay: int | None
    early: int
    failed: int

    @classmethod
    def of(cls, outcomes: Outcomes) -> "Share":
        """Return the sums of outcomes."""
        good = [o for o in outcomes if "error" not in o]
        delays = sorted(o["delay"] for o in good if o["detected"])
        return cls(
            len(good),
            len(delays),
            sum(o["first_right"] for o in good),
            delays[len(delays) // 2] if delays else None,
            sum(o["early"] for o in good),
            len(outcomes) - len(good),
        )

    @property
    def shares(self) -> tuple[float, float]:
        """Found and right, in percent of the runs."""
        return (100 * self.found / self.runs, 100 * self.right / self.runs) if self.runs else (0.0, 0.0)

    def cells(self) -> str:
        """Return the cells of a table's row."""
        found, right = self.shares
        delay = "–" if self.delay is None else self.delay
        return f"{self.runs} | {self.found} ({found:.0f} %) | {self.right} ({right:.0f} %) | {delay} | {self.early}"


def is_unseen(outcome: dict[str, Any]) -> bool:
    """Whether an outcome is of a family that nobody looks at."""
    return outcome["family"] in UNSEEN


def summary(outcomes: Outcomes) -> dict[str, Any]:
    """Return all sums by configuration, as plain data: seen, unseen, by group of faults, by family."""
    cases = work.load_cases("open")
    return {
        collect: {
            "seen": _by(runs, lambda _: "seen", unseen=False),
            "unseen": _by(runs, lambda _: "unseen", unseen=True),
            "groups": _by(runs, lambda o: cases[o["case"]].group, unseen=False),
            "families": {k: v for hidden in (False, True) for k, v in _by(runs, _family, unseen=hidden).items()},
        }
        for collect in work.COLLECT
        if (runs := [o for o in outcomes if o["collect"] == collect])
    }  # fmt: skip


def _family(outcome: dict[str, Any]) -> str:
    return str(outcome["family"])


def _by(outcomes: Outcomes, key: Callable[[dict[str, Any]], str], *, unseen: bool) -> dict[str, Any]:
    chosen = [o for o in outcomes if is_unseen(o) == unseen]
    return {name: asdict(Share.of([o for o in chosen if key(o) == name])) for name in sorted({key(o) for o in chosen})}


def tables(outcomes: Outcomes) -> Iterator[str]:
    """Yield the tables of the whole, and the gap between seen and unseen families in points."""
    for collect, sums in summary(outcomes).items():
        yield f"\n## {collect}\n"
        yield "| | runs | found | first suspect right | delay | early |"
        yield "|---|---|---|---|---|---|"
        for part in ("seen", "unseen"):
            for name, sum_ in sums[part].items():
                yield f"| **{name} families** | {Share(**sum_).cells()} |"
        for part in ("families", "groups"):
            for name in sorted(sums[part], key=lambda n: (n in UNSEEN, [*FAMILIES, n].index(n))):
                yield f"| {name} | {Share(**sums[part][name]).cells()} |"
        if sums["seen"] and sums["unseen"]:
            seen, unseen = (Share(**sums[part][part]).shares for part in ("seen", "unseen"))
            gaps = [one - other for one, other in zip(seen, unseen, strict=True)]
            yield f"\ngap: found {gaps[0]:+.1f} points, first suspect right {gaps[1]:+.1f} points"
    failed = [o for o in outcomes if "error" in o]
    if failed:
        yield f"\nfailed runs: {len(failed)}"


def missed(outcomes: Outcomes) -> Iterator[str]:
    """Yield what was not found or not named rightly in the seen families: what was planted, and what was said."""
    cases = work.load_cases("open")
    yield "| configuration | case | family | planted | found | said |"
    yield "|---|---|---|---|---|---|"
    for o in sorted(outcomes, key=lambda o: (o["collect"], cases[o["case"]].group, o["case"])):
        if is_unseen(o) or ("error" not in o and o["first_right"] and not o["early"]):
            continue
        found = "failed" if "error" in o else f"{o['delay']} steps" if o["detected"] else "no"
        early = f" ({o['early']} early)" if o.get("early") else ""
        said = (o.get("error") or o["said"] or "nothing").replace("|", "/").replace("\n", " ")
        where = f"{cases[o['case']].group}: {o['case']}"
        yield f"| {o['collect']} | {where} | {o['family']} | {cases[o['case']].title} | {found}{early} | {said[:420]} |"


def compared(new: Outcomes, old: Outcomes, which: Callable[[dict[str, Any]], Any]) -> Iterator[str]:
    """Yield what differs between two versions of the code: runs by name in seen families, counts in the others."""
    before = {which(o): o for o in old}
    both = [(o, before[which(o)]) for o in new if which(o) in before]
    yield f"\n{len(both)} runs in both"
    for key in ("detected", "first_right"):
        won, lost = (
            [o for o, b in both if o.get(key, False) == sign and b.get(key, False) != sign] for sign in (True, False)
        )
        yield f"{key}: {len(won)} won, {len(lost)} lost; of these unseen {_count(won)} and {_count(lost)}"
        for mark, some in (("+", won), ("-", lost)):
            yield from (f"  {mark} {' '.join(map(str, which(o)))}" for o in some if not is_unseen(o))


def _count(outcomes: Iterable[dict[str, Any]]) -> int:
    return sum(is_unseen(o) for o in outcomes)
