"""What detectors have learned, as plain data that goes into a checkpoint: by the names of series, not by their ids."""

from collections.abc import Iterator
from typing import Any, Final

from trainsentry.collectors.series import Series, SeriesTable

VERSION: Final = 3


def described(table: SeriesTable, count: int) -> dict[str, Any]:
    """Return the version of the format, and the first `count` series, in whose order the rest is kept."""
    return {"version": VERSION, "series": [_key(series) for series in table.series[:count]]}


def is_current(state: dict[str, Any]) -> bool:
    """Whether a state can be read."""
    return state.get("version") == VERSION


class SavedSeries:
    """Finds the saved places of series as they are defined anew."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state
        self._places = {tuple(key): place for place, key in enumerate(state["series"])}
        self._looked_at = 0

    def news(self, table: SeriesTable) -> Iterator[tuple[int, int]]:
        """Yield ids and places of the series that were defined since the last call and are known."""
        first, self._looked_at = self._looked_at, len(table.series)
        for series_id, series in enumerate(table.series[first:], first):
            place = self._places.get(_key(series))
            if place is not None:
                yield series_id, place


def _key(series: Series) -> tuple[str, str, int, int]:
    return series.name, series.quantity, series.micro_step, series.vpp_stage
