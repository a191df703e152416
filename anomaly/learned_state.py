"""The learned state in a checkpoint: plain data by the names of series, not by their ids."""

from collections.abc import Iterator
from typing import Any, Final

from trainsentry.collectors.series import Series, SeriesTable

VERSION: Final = 3

LEARNED_STATE: Final = "learned state"
"""What a state that cannot be taken over is called in the log and in the gaps."""


def described(table: SeriesTable, count: int) -> dict[str, Any]:
    """Return the version of the format, and the first `count` series; per-series state is kept in their order."""
    return {"version": VERSION, "series": [_key(series) for series in table.series[:count]]}


def is_current(state: dict[str, Any]) -> bool:
    """Whether a state has the current format."""
    return state.get("version") == VERSION


class SavedSeries:
    """Finds the saved positions of series, as a restarted run defines them."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state
        self._positions = {tuple(key): position for position, key in enumerate(state["series"])}
        self._looked_at = 0

    def table(self) -> SeriesTable:
        """Return a table of the saved series.

        Raises:
            ValueError: when series have keys of another shape.

        """
        table = SeriesTable()
        for name, quantity, micro_step, vpp_stage in self._positions:
            table.series_id(Series(name, quantity, micro_step=micro_step, vpp_stage=vpp_stage))
        return table

    def new(self, table: SeriesTable) -> Iterator[tuple[int, int]]:
        """Yield id and saved position of the saved series that were defined since the last call."""
        first, self._looked_at = self._looked_at, len(table.series)
        for series_id, series in enumerate(table.series[first:], first):
            position = self._positions.get(_key(series))
            if position is not None:
                yield series_id, position


def _key(series: Series) -> tuple[str, str, int, int]:
    return series.name, series.quantity, series.micro_step, series.vpp_stage
