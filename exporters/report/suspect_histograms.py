"""Collects a bounded number of histograms of suspects: of steps that are merged, the one that reaches out most."""

from collections.abc import Iterable, Sequence
from typing import Final

from trainsentry.collectors.histogram import parse
from trainsentry.exporters.csv.table_rows import RowKeys, TableRows

MAX_KEPT: Final = 1600
"""Histograms that are kept of a series, some 3 MB, before neighbours are merged; a map has 200 columns."""

Histogram = tuple[list[int], list[int]]
"""The numbers of bins, and their counts."""

StepHistogram = tuple[int, Histogram]
"""A step and its histogram."""


def farthest(group: Sequence[StepHistogram]) -> StepHistogram:
    """Return the histogram with the largest magnitude, so that the spike of one step stays when steps are merged."""
    return max(group, key=lambda item: max(-item[1][0][0], item[1][0][-1]))


class SuspectHistograms:
    """Takes a table's rows; keeps the histograms of some series."""

    def __init__(self, names: Iterable[str]) -> None:
        self._kept: dict[str, list[StepHistogram]] = {name: [] for name in names}
        self._every: dict[str, int] = {}
        self._last: dict[str, list[StepHistogram]] = {name: [] for name in names}

    def take(self, rows: TableRows, keys: RowKeys) -> None:
        """Add a step; a text that is no histogram is skipped."""
        if rows.histograms is None or not self._kept:
            return
        for row, key in enumerate(rows.keys.tolist()):
            name = keys.keys[key].name
            if name in self._kept and rows.histograms[row]:
                self._add(name, rows.step, rows.histograms[row])

    def found(self) -> dict[str, list[StepHistogram]]:
        """Return the histograms by name, in the order of their steps."""
        return {
            name: [*kept, *([farthest(self._last[name])] if self._last[name] else [])]
            for name, kept in self._kept.items()
            if kept or self._last[name]
        }

    def _add(self, name: str, step: int, text: str) -> None:
        try:
            histogram = parse(text)
        except ValueError:
            return
        last, kept = self._last[name], self._kept[name]
        last.append((step, histogram))
        if len(last) < self._every.get(name, 1):
            return
        kept.append(farthest(last))
        last.clear()
        if len(kept) >= MAX_KEPT:
            self._every[name] = 2 * self._every.get(name, 1)
            self._kept[name] = [farthest(kept[i : i + 2]) for i in range(0, len(kept), 2)]
