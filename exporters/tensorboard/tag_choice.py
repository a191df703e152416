"""Chooses the single series that get a tag: TensorBoard takes minutes to list 12,000 of them."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

import numpy as np
import numpy.typing as npt

from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import COMMUNICATION_CALL, COMMUNICATION_ORDER, VALUE_NAMES, SeriesTable
from trainsentry.collectors.statistics import STATISTICS, VALUE
from trainsentry.exporters.tensorboard.event_file import tag

LOSS_FIRST: Final = "0_overview/loss"
"""The loss once more, in the group that TensorBoard's first page opens on: groups stand in the order of their names."""

QUIET: Final = ("nans", "infs", "zeros")
"""Statistics that are 0 on most series for a whole run; they get a tag from their first other value on."""


class SilentNumbers:
    """The `QUIET` numbers of series that have been 0 so far, under any key; live and converted files leave them out.

    A tag begins at its first other value and goes on from there, so no value before it means 0.
    """

    def __init__(self) -> None:
        self._awake: set[Hashable] = set()

    def has(self, key: Hashable, statistic: str) -> bool:
        """Return whether a statistic of a series is left out so far."""
        return statistic in QUIET and key not in self._awake

    def wake(self, keys: Sequence[Hashable], values: npt.NDArray[np.float64]) -> bool:
        """Take in a step's values of numbers that are left out; return whether one of them is other than 0."""
        loud = np.flatnonzero(np.nan_to_num(values) != 0)
        self._awake.update(keys[i] for i in loud.tolist())
        return bool(len(loud))


MOST_LAYOUTS: Final = 64
"""Sets of series whose places are kept: micro-steps and sampling make a few; more would be a leak."""


@dataclass(frozen=True)
class _Tag:
    """A number of a series: its tag, its column in the record and its statistic ("" for a scalar)."""

    tag: str
    column: int
    statistic: str


@dataclass(frozen=True)
class _Layout:
    """Some numbers of a record: their tags, their keys (series and column), their rows and their columns."""

    tags: list[str]
    keys: list[tuple[int, int]]
    rows: npt.NDArray[np.intp]
    columns: npt.NDArray[np.intp]


class TagChoice:
    """The tags of single series, at most `limit` of them (-1: any number) besides scalars and suspects.

    Above the limit the norm of each layer comes first, then the other statistics in their configured order. A tag that
    makes room for a more important one that appears later ends there.
    """

    def __init__(self, table: SeriesTable, statistics: Sequence[str], raw: Sequence[str], limit: int) -> None:
        self.table = table
        self.limit = limit
        self._raw = tuple(raw)
        self._columns = [(name, STATISTICS.index(name)) for name in statistics]
        others = [name for name in statistics if name != "norm"]
        self._order = {name: i for i, name in enumerate(("norm", *VALUE_NAMES.values(), *others))}
        self._known: dict[int, list[_Tag]] = {}
        self._silent = SilentNumbers()
        self._suspects: set[tuple[str, str]] = set()
        self._chosen: set[tuple[int, int]] | None = None
        self._layouts: dict[bytes, tuple[_Layout, _Layout]] = {}

    def of(self, record: StepRecord) -> tuple[list[str], npt.NDArray[np.float64]]:
        """Return the tags of a record and their values; the same list of tags while nothing changes."""
        ids = record.ids.tobytes()
        if ids not in self._layouts:
            self._learn(record)
        written, silent = self._layouts.get(ids) or self._lay_out(ids, record)
        if self._silent.wake(silent.keys, record.values[silent.rows, silent.columns]):
            self._choose()
            written, _ = self._lay_out(ids, record)
        return written.tags, record.values[written.rows, written.columns]

    def add_suspects(self, found: Sequence[tuple[str, str]]) -> None:
        """Keep all numbers of these series, given as name and quantity."""
        if not self._suspects.issuperset(found):
            self._suspects.update(found)
            self._choose()

    @property
    def left_out(self) -> dict[str, int]:
        """How many series lack each statistic, because of the limit."""
        if self._chosen is None:
            return {}
        return dict(Counter(t.statistic for i, t in self._candidates() if (i, t.column) not in self._chosen))

    def sentence(self) -> str:
        """Return what is left out, or an empty text."""
        left_out = self.left_out
        if not left_out:
            return ""
        what = ", ".join(f"{statistic} of {n}" for statistic, n in left_out.items())
        kept = len(self._chosen or ())
        return (
            f"Single series: {kept} tags are here, {sum(left_out.values())} are left out ({what}), as "
            f"`export.tensorboard.max_raw_tags` is {self.limit}. Scalars, suspects and the layers' norms are kept "
            f"first. The CSV tables have all of them; `-1` writes all here."
        )

    def _learn(self, record: StepRecord) -> None:
        """Take in new series."""
        new = [series_id for series_id in record.ids.tolist() if series_id not in self._known]
        self._known.update((series_id, self._new_tags(series_id)) for series_id in new)
        if new:
            self._choose()

    def _is_silent(self, series_id: int, found: _Tag) -> bool:
        return self._silent.has((series_id, found.column), found.statistic)

    def _candidates(self) -> list[tuple[int, _Tag]]:
        """Return the numbers that count against the limit and are not silent."""
        return [
            (series_id, found)
            for series_id, tags in self._known.items()
            for found in tags
            if found.statistic and not self._is_silent(series_id, found)
        ]

    def _choose(self) -> None:
        """Choose the numbers that fit; None stands for all."""
        self._layouts.clear()
        candidates = self._candidates()
        if not 0 <= self.limit < len(candidates):
            self._chosen = None
            return
        suspects = [(i, t.column) for i, t in candidates if self._is_suspect(i)]
        others = [(i, t) for i, t in candidates if not self._is_suspect(i)]
        others.sort(key=lambda item: self._order.get(item[1].statistic, len(self._order)))
        self._chosen = {*suspects, *((i, t.column) for i, t in others[: self.limit])}

    def _is_suspect(self, series_id: int) -> bool:
        series = self.table.series[series_id]
        return (series.name, series.quantity) in self._suspects

    def _lay_out(self, ids: bytes, record: StepRecord) -> tuple[_Layout, _Layout]:
        """Return what is written of a record with these ids, and what is watched for its first value."""
        if len(self._layouts) >= MOST_LAYOUTS:
            self._layouts.clear()
        series = record.ids.tolist()
        written = [[t for t in self._known[i] if self._is_written(i, t)] for i in series]
        silent = [[t for t in self._known[i] if self._is_silent(i, t)] for i in series]
        self._layouts[ids] = (_layout(series, written), _layout(series, silent))
        return self._layouts[ids]

    def _is_written(self, series_id: int, found: _Tag) -> bool:
        if not found.statistic:
            return True
        if self._is_silent(series_id, found):
            return False
        return self._chosen is None or (series_id, found.column) in self._chosen

    def _new_tags(self, series_id: int) -> list[_Tag]:
        s = self.table.series[series_id]
        if s.quantity in {COMMUNICATION_CALL, COMMUNICATION_ORDER}:
            return []
        if s.scalar:
            first = [_Tag(LOSS_FIRST, VALUE, "")] if s.name == "loss" and not s.micro_step else []
            return [*first, _Tag(tag(s.quantity, "value", s.name, s.micro_step, scalar=True), VALUE, "")]
        if not any(fnmatchcase(s.name, pattern) for pattern in self._raw):
            return []
        columns = [*self._columns, *((VALUE_NAMES[q], VALUE) for q in (s.quantity,) if q in VALUE_NAMES)]
        return [_Tag(tag(s.quantity, n, s.name, s.micro_step, vpp_stage=s.vpp_stage), i, n) for n, i in columns]


def _layout(series: list[int], kept: list[list[_Tag]]) -> _Layout:
    """Return the places of the tags of each row, which is one series."""
    rows = np.repeat(np.arange(len(kept)), [len(tags) for tags in kept])
    columns = np.asarray([found.column for tags in kept for found in tags], np.intp)
    keys = [(series_id, found.column) for series_id, tags in zip(series, kept, strict=True) for found in tags]
    return _Layout([found.tag for tags in kept for found in tags], keys, rows, columns)
