"""The learned state in a checkpoint: plain data by the names of series, not by their ids."""

from collections.abc import Iterator
from typing import Any, Final

from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import Series, SeriesTable

VERSION: Final = 3

LEARNED_STATE: Final = "learned state"
"""What a state that cannot be taken over is called in the log and in the gaps."""


def described(table: SeriesTable, layouts: list[int]) -> dict[str, Any]:
    """Return the version of the format, and the first series with their regions; states by series have their order.

    `layouts` has the id of each one's newest layout, below 0 where it has none.
    """
    regions = [table.layouts[layout].region if layout >= 0 else "" for layout in layouts]
    return {"version": VERSION, "series": [_key(s) for s in table.series[: len(layouts)]], "regions": regions}


def is_current(state: dict[str, Any]) -> bool:
    """Whether a state has the current format."""
    return state.get("version") == VERSION


class SavedSeries:
    """Finds the saved positions of series, as a restarted run defines them.

    What is known of one part of a sharded tensor says nothing of another: on other ranks a series begins anew.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state
        self._positions = {tuple(key): position for position, key in enumerate(state["series"])}
        regions = state.get("regions", [""] * len(state["series"]))
        self._regions: list[str] = [region for _, region in zip(state["series"], regions, strict=True)]
        self._looked_at = 0
        self._waiting: dict[int, int] = {}

    def table(self) -> SeriesTable:
        """Return a table of the saved series.

        Raises:
            ValueError: when series have keys of another shape.

        """
        table = SeriesTable()
        for name, quantity, micro_step, vpp_stage in self._positions:
            table.series_id(Series(name, quantity, micro_step=micro_step, vpp_stage=vpp_stage))
        return table

    def all_in(self, table: SeriesTable) -> Iterator[tuple[int, int]]:
        """Yield id and saved position of every saved series of a table."""
        found = ((series_id, self._positions.get(_key(series))) for series_id, series in enumerate(table.series))
        return ((series_id, position) for series_id, position in found if position is not None)

    def new(self, table: SeriesTable, record: StepRecord) -> Iterator[tuple[int, int]]:
        """Yield id and saved position of the saved series that a record has for the first time, of the same region."""
        self._look_at(table)
        if not self._waiting:
            return
        for series_id, layout in zip(record.ids.tolist(), record.layouts.tolist(), strict=True):
            position = self._waiting.pop(series_id, None)
            if position is not None and self._regions[position] == table.layouts[layout].region:
                yield series_id, position

    def unsharded(self, table: SeriesTable) -> Iterator[tuple[int, int]]:
        """Yield id and saved position of the whole tensors that no record has had so far."""
        self._look_at(table)
        whole = {series_id: position for series_id, position in self._waiting.items() if not self._regions[position]}
        for series_id, position in whole.items():
            del self._waiting[series_id]
            yield series_id, position

    def _look_at(self, table: SeriesTable) -> None:
        first, self._looked_at = self._looked_at, len(table.series)
        for series_id, series in enumerate(table.series[first:], first):
            position = self._positions.get(_key(series))
            if position is not None:
                self._waiting[series_id] = position


def _key(series: Series) -> tuple[str, str, int, int]:
    return series.name, series.quantity, series.micro_step, series.vpp_stage
