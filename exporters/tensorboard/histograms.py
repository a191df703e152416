"""Writes the histograms of single series for TensorBoard's pages of histograms and distributions."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.histogram import metadata
from tensorboard.util import tensor_util

from trainsentry.collectors.histogram import HISTOGRAM, edges_of
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import SeriesTable, writable
from trainsentry.collectors.statistics import MAX, MIN
from trainsentry.exporters.tensorboard.event_file import tag

MAX_HISTOGRAMS: Final = 500
"""Series with histograms at most, besides suspects: TensorBoard's page draws each of them, and takes some seconds for
500."""

SPACING: Final = 20
"""A histogram is written once another twentieth of the steps so far has passed, so in a long run a page has as many of
its beginning as of its end; 100,000 steps give 190, some 0.3 MB a series."""


def histogram_value(
    name: str, numbers: npt.NDArray[np.int16], counts: npt.NDArray[np.uint32], low: float, high: float
) -> Summary.Value:
    """Return a histogram from the numbers of its bins and their counts; `low` and `high` end the outermost bins."""
    edges = np.asarray([edges_of(number) for number in numbers.tolist()])
    edges = edges.clip(low, high) if np.isfinite(low) and np.isfinite(high) else edges
    buckets = np.column_stack([edges, counts.astype(np.float64)])
    tensor: Any = tensor_util.make_tensor_proto(buckets, dtype=np.float64)
    described = metadata.create_summary_metadata(display_name="", description="")
    return Summary.Value(tag=writable(name), tensor=tensor, metadata=described)


class HistogramTags:
    """The histograms of series whose names match one of `raw`, at growing distances of steps; suspects come on top."""

    def __init__(self, table: SeriesTable, raw: Sequence[str]) -> None:
        self.table = table
        self._raw = tuple(raw)
        self._tags: dict[int, str] = {}
        self._suspects: set[tuple[str, str]] = set()
        self._left_out: set[int] = set()
        self._written: int | None = None

    def of(self, record: StepRecord) -> list[Summary.Value]:
        """Return the histograms of a record that is due; all records of a step are due together."""
        if record.histograms is None:
            return []
        last = self._written
        if last is not None and last < record.step < last + max(1, last // SPACING):
            return []
        self._written = record.step
        return list(self._values(record))

    def add_suspects(self, found: Sequence[tuple[str, str]]) -> None:
        """Write the histograms of these series, given as name and quantity, whatever the limit."""
        self._suspects.update(found)

    def sentence(self) -> str:
        """Return what is left out, or an empty text."""
        if not self._left_out:
            return ""
        n = len(self._left_out)
        return f"Histograms of {n} series are left out, as there are {MAX_HISTOGRAMS} others; the tables have all."

    def _values(self, record: StepRecord) -> Iterator[Summary.Value]:
        assert record.histograms is not None
        for row, series_id in enumerate(record.ids.tolist()):
            numbers, counts = record.histograms.row(row)
            name = self._tag(series_id) if len(numbers) else ""
            if name:
                low, high = record.values[row, MIN], record.values[row, MAX]
                yield histogram_value(name, numbers, counts, float(low), float(high))

    def _tag(self, series_id: int) -> str:
        """Return the tag of a series' histograms; none is empty."""
        known = self._tags.get(series_id)
        if known is not None:
            return known
        s = self.table.series[series_id]
        blamed = (s.name, s.quantity) in self._suspects
        if s.scalar or not (blamed or any(fnmatchcase(s.name, pattern) for pattern in self._raw)):
            return ""
        if not blamed and len(self._tags) >= MAX_HISTOGRAMS:
            self._left_out.add(series_id)
            return ""
        self._left_out.discard(series_id)
        found = tag(s.quantity, HISTOGRAM, s.name, s.micro_step, vpp_stage=s.vpp_stage)
        self._tags[series_id] = found
        return found
