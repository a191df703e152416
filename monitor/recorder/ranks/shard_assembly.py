"""Combines the ranks' parts of each tensor, step by step."""

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trainsentry.collectors.histogram import Histograms, added, joined
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import (
    BUFFER,
    GRADIENT,
    PARAMETER,
    UNKNOWN_REGION,
    UPDATE,
    Layout,
    Series,
    SeriesTable,
)
from trainsentry.collectors.statistics import VALUE, combine
from trainsentry.monitor.recorder.ranks.peer_messages import ALL, InvalidMessage, check_definitions
from trainsentry.monitor.recorder.ranks.replica_groups import PARTED, ReplicaGroups, outvoted

PENDING_STEPS: Final = 64
"""Steps that may wait for a slow rank; with 10,000 series and 8 ranks each takes 6 MB."""

MAX_STEPS_AHEAD: Final = 1_000_000
"""Steps that a rank may be ahead of all others. Ranks that train together differ by one step, their recorders by the
steps that a ring holds, about 10,000. A larger step would make the assembly give up all waiting steps."""

MAX_ROLLBACKS_AHEAD: Final = 8
"""Rollbacks that a rank may have more than all others; ranks roll back together."""

MAX_DEFINED: Final = 2**19
"""Series, and layouts, that one rank may define; a model of 100,000 parameters needs as many with its optimizer."""

MAX_QUANTITIES: Final = 64
"""Quantities of all ranks together; each has its own file."""


def is_global(series: Series) -> bool:
    """Whether a series is a shard or a replica of a tensor that several ranks hold."""
    return series.quantity in {GRADIENT, PARAMETER, UPDATE} or series.is_state


def may_have_replicas(series: Series) -> bool:
    """Whether the ranks' copies of a series may have to be equal; buffers may, and each rank records its own."""
    return is_global(series) or series.quantity == BUFFER


@dataclass
class _Source:
    """One rank's records: the translation of its ids to ours, and its progress."""

    table: SeriesTable
    series: list[int] = field(default_factory=list)
    layouts: list[int] = field(default_factory=list)
    done: int = -1
    backs: int = 0
    newest: int = -1
    outdated: int = 0
    brought: int = 0


Rows = tuple[tuple[int, int], npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float64], Histograms | None]
"""A rank with its number of rollbacks, and the series, layouts, values and histograms of its rows."""


class ShardAssembly:
    """Combines rows of the same series from several ranks. Replicas, which cover the same region, count once.

    With `final`, only completely covered tensors give a row, with their full shape, and buffers are compared alone.
    Without, the available parts are combined into one row for the next recorder of the tree, with one name for their
    regions.
    """

    def __init__(self, rank: int, ranks: "set[int]", *, final: bool) -> None:
        self.rank = rank
        self.final = final
        self.table = SeriesTable()
        self.incomplete = 0
        self.copies = ReplicaGroups(self.table, judges=final)
        self._sources: dict[int, _Source] = {r: _Source(SeriesTable()) for r in ranks}
        self._pending: dict[int, list[Rows]] = {}
        self._written = -1
        self._quantities: set[str] = set()

    def define(self, rank: int, definitions: dict[str, Any]) -> None:
        """Add the series that a rank defined; a rank that defines all series again may number them differently.

        Raises:
            InvalidMessage: when the definitions are invalid or too many.

        """
        source = self._sources.get(rank)
        if source is None:
            return
        restarts = definitions["series_from"] == definitions["layouts_from"] == 0 and len(source.table.series) > 0
        table = SeriesTable() if restarts else source.table
        check_definitions(definitions, table)
        quantities = self._quantities | {s["quantity"] for s in definitions["series"] if not s.get("scalar")}
        most = max(len(table.series) + len(definitions["series"]), len(table.layouts) + len(definitions["layouts"]))
        if len(quantities) > MAX_QUANTITIES or max(most, source.brought) > MAX_DEFINED:
            raise InvalidMessage(f"rank {rank} defines too many series or quantities")
        if restarts:
            source.table, source.series, source.layouts = table, [], []
        table.define(definitions)
        self._quantities = quantities

    def use_table(self, rank: int, table: SeriesTable) -> None:
        """Use the series table of a rank whose table is available here."""
        self._sources[rank].table = table

    def table_of(self, rank: int) -> SeriesTable:
        """Return the series table of a rank."""
        return self._sources[rank].table

    def take(self, rank: int, record: StepRecord) -> None:
        """Add a rank's rows of a step."""
        if self.is_outdated(rank):
            return
        source = self._sources[rank]
        source.newest = record.step
        source.done = max(source.done, record.step - 1)
        if record.step <= self._written or not len(record):
            return
        self._translate(source)
        series = np.asarray(source.series, np.int64)[record.ids]
        wanted = series >= 0
        layouts = np.asarray(source.layouts, np.int64)[record.layouts]
        counted = record.histograms.select(wanted) if record.histograms is not None else None
        rows = ((rank, source.backs), series[wanted], layouts[wanted], record.values[wanted], counted)
        self._pending.setdefault(record.step, []).append(rows)

    def take_copies(self, rank: int, step: int, copies: "Iterable[Sequence[int]]") -> None:
        """Add the differing copies that another recorder sent.

        Raises:
            IndexError: for a series that the recorder has not defined.

        """
        source = self._sources[rank]
        self._translate(source)
        found = []
        for key, of, fingerprint, equal_at in copies:
            series, layout = source.series[key >> 32], source.layouts[key & 0xFFFFFFFF]
            if series >= 0:
                found.append((series << 32 | layout, of, fingerprint, equal_at))
        if step > self._written:
            self.copies.take(step, (rank, source.backs), found)

    def finish(self, rank: int, step: int) -> None:
        """Note that a rank has sent everything up to `step`, or `ALL` when it is gone."""
        if rank in self._sources:
            self._sources[rank].done = max(self._sources[rank].done, step)

    def await_again(self, rank: int) -> None:
        """Wait again for a rank that reconnected."""
        if rank in self._sources:
            self._sources[rank].done = min(self._sources[rank].done, self.settled_without(rank))

    def settled_without(self, rank: int) -> int:
        """Return the last step that is settled regardless of this rank."""
        others = [source.done for r, source in self._sources.items() if r != rank and source.done < ALL]
        return max(min(others, default=-1), self._written)

    def is_outdated(self, rank: int) -> bool:
        """Whether a rank's messages are from before a rollback that other ranks have already made."""
        source = self._sources.get(rank)
        return source is None or source.backs < max(s.backs for s in self._sources.values())

    def leave_out(self, rank: int) -> None:
        """Remove a rank and its rows, after too many invalid messages."""
        self._sources.pop(rank, None)
        self._drop(-1, lambda of: of[0] == rank)

    def is_far_ahead(self, rank: int, step: int) -> bool:
        """Whether a step is more than MAX_STEPS_AHEAD ahead of all other ranks."""
        others = [s.newest for r, s in self._sources.items() if r != rank and s.newest >= 0 and s.done < ALL]
        return bool(others) and step > max(others) + MAX_STEPS_AHEAD

    def has_gone_back(self, rank: int, step: int) -> bool:
        """Whether an outdated rank's record shows that it has rolled back, though its message was lost."""
        source = self._sources.get(rank)
        if source is None:
            return False
        source.outdated += 1
        return step < source.newest or source.outdated > PENDING_STEPS

    def go_back(self, rank: int, step: int) -> list[int]:
        """Note that a rank rolls back to `step`; return the ranks whose rows are dropped.

        Rows of ranks that have not rolled back yet belong to the old steps and never meet new ones.

        Raises:
            InvalidMessage: when the rank has rolled back much more often than all others.

        """
        source = self._sources.get(rank)
        if source is None:
            return []
        if (
            source.backs - max((s.backs for s in self._sources.values() if s is not source), default=0)
            >= MAX_ROLLBACKS_AHEAD
        ):
            raise InvalidMessage(f"rank {rank} rolls back again and again, and no other rank does")
        source.backs += 1
        source.done = source.newest = step - 1
        source.outdated = 0
        self._written = min(self._written, step - 1)
        old = [r for r, s in self._sources.items() if s.backs < source.backs]
        for other in (self._sources[r] for r in old):
            if other.done < ALL:
                other.done = min(other.done, step - 1)
        self._drop(step, lambda of: (of[0] == rank or of[0] in old) and of[1] < source.backs)
        return [rank, *old]

    def _drop(self, step: int, is_old: Callable[[tuple[int, int]], bool]) -> None:
        for s in [s for s in self._pending if s >= step]:
            self._pending[s] = [rows for rows in self._pending[s] if not is_old(rows[0])]
            if not self._pending[s]:
                del self._pending[s]
        self.copies.drop(step, is_old)

    @property
    def settled(self) -> int:
        """The last step that every rank has sent, or that no longer waits."""
        return max(self.done, self._written)

    @property
    def done(self) -> int:
        """The last step that every rank has sent."""
        return min((source.done for source in self._sources.values()), default=ALL)

    def heard_up_to(self, step: int) -> int:
        """Return the last step that every rank has sent or is no longer waited for; `step` is this rank's newest."""
        return max(self.done, step - PENDING_STEPS)

    def complete(self) -> Iterator[StepRecord]:
        """Yield, in order, the records of steps that every rank has sent or that have waited too long."""
        done = self.done
        for step in sorted(self._pending):
            if step > done and len(self._pending) <= PENDING_STEPS:
                return
            self._written = step
            record = self._combine(step, self._pending.pop(step))
            if len(record):
                yield record

    def _translate(self, source: _Source) -> None:
        """Extend the translation of a rank's ids by its new definitions."""
        known = len(self.table.series) + len(self.table.layouts)
        for series in source.table.series[len(source.series) :]:
            source.series.append(self.table.series_id(series) if may_have_replicas(series) else -1)
        for layout in source.table.layouts[len(source.layouts) :]:
            source.layouts.append(self.table.layout_id(layout))
        source.brought += len(self.table.series) + len(self.table.layouts) - known

    def _combine(self, step: int, rows: list[Rows]) -> StepRecord:
        series, layouts = (np.concatenate([r[i] for r in rows]) for i in (1, 2))
        values = np.concatenate([r[3] for r in rows])
        counted = joined([r[4] for r in rows])
        ranks = np.concatenate([np.full(len(r[1]), r[0][0]) for r in rows])
        # Sort rows by series; of rows that cover the same region keep the first.
        keys = series << 32 | layouts
        strangers, differing = self.copies.compare(step, keys, ranks, values)
        order = np.argsort(outvoted(differing, keys, ranks), kind="stable") if differing else np.arange(len(keys))
        first = order[np.unique(keys[order], return_index=True)[1]]
        known = np.asarray([x.region != UNKNOWN_REGION for x in self.table.layouts])
        recorded = np.asarray([is_global(s) or not self.final for s in self.table.series], bool)
        first = first[known[layouts[first]] & recorded[series[first]] & ~np.isin(series[first], strangers)]
        series, layouts, values = series[first], layouts[first], values[first]
        starts = np.flatnonzero(np.diff(series, prepend=-1)).astype(np.intp)
        numel = np.asarray([x.numel for x in self.table.layouts], np.int64)[layouts]
        ids = series[starts]
        ratios = np.asarray([s.quantity == UPDATE for s in self.table.series], bool)[ids]
        whole = combine(values, numel, starts, ratios)
        histograms = added(counted.select(first), starts) if counted is not None else None
        alone = (np.diff(np.append(starts, len(values))) == 1) & ~ratios
        whole[alone, VALUE] = values[starts[alone], VALUE]  # the fingerprint of the one copy that counts
        if not self.copies.judges:
            whole[np.isin(ids, [copies.key >> 32 for copies in differing]), VALUE] = PARTED
        wholes = [self._joined(part) for part in np.split(layouts, starts[1:])] if len(starts) else []
        kept = np.asarray([layout is not None for layout in wholes], bool)
        self.incomplete += int(np.count_nonzero(~kept))
        found = [self.table.layout_id(layout) for layout in wholes if layout is not None]
        return StepRecord(
            step,
            self.rank,
            ids[kept].astype(np.int32),
            np.asarray(found, np.int32),
            whole[kept],
            time=time.time(),
            histograms=histograms.select(kept) if histograms is not None else None,
        )

    def _joined(self, parts: npt.NDArray[np.int64]) -> Layout | None:
        """Return the layout of combined parts of one tensor; with `final`, None when they do not cover it."""
        layouts: list[Layout] = [self.table.layouts[i] for i in parts.tolist()]
        first = layouts[0]
        shape = first.whole if first.whole is not None else first.shape
        numel = sum(x.numel for x in layouts)
        if numel == math.prod(shape) and len({x.dtype for x in layouts}) == 1:
            return Layout(shape, first.dtype, numel)
        if self.final:
            return None
        regions = ";".join(sorted(x.region for x in layouts))
        return first if len(layouts) == 1 else replace(first, numel=numel, region=_short(regions))


def _short(regions: str) -> str:
    return f"#{hashlib.blake2b(regions.encode(), digest_size=12).hexdigest()}"
