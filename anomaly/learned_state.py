"""The learned state in a checkpoint: plain data by the names of series, not by their ids."""

from collections.abc import Iterator
from typing import Any, Final

from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import Series, SeriesTable

VERSION: Final = 3

LEARNED_STATE: Final = "learned state"
"""What a state that cannot be taken over is called in the log and in the gaps."""


def described(table: SeriesTable, layouts: list[int], before: "SavedSeries | None" = None) -> dict[str, Any]:
    """Return the version of the format, and the first series with their regions; states by series have their order.

    `layouts` has the id of each one's newest layout, below 0 where it has none: its region is then as it was `before`.
    """
    known = {} if before is None else before.regions_of(table)
    regions = [table.layouts[x].region if x >= 0 else known.get(i, "") for i, x in enumerate(layouts)]
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
        self._same = self._others = 0  # sharded series that had their region, and another one

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
            if position is None:
                continue
            is_same = self._regions[position] == table.layouts[layout].region
            self._others += not is_same
            self._same += is_same and bool(self._regions[position])
            if is_same:
                yield series_id, position

    def unseen(self, table: SeriesTable) -> Iterator[tuple[int, int]]:
        """Yield id and saved position of the series that no record has had so far, for a checkpoint to keep them.

        Shards are among them where all that were seen are those of before.
        """
        self._look_at(table)
        shards = self._same > 0 and not self._others
        found = {i: position for i, position in self._waiting.items() if shards or not self._regions[position]}
        for series_id, position in found.items():
            del self._waiting[series_id]
            yield series_id, position

    def regions_of(self, table: SeriesTable) -> dict[int, str]:
        """Return the saved regions of a table's series, by id."""
        return {series_id: self._regions[position] for series_id, position in self.all_in(table)}

    def _look_at(self, table: SeriesTable) -> None:
        first, self._looked_at = self._looked_at, len(table.series)
        for series_id, series in enumerate(table.series[first:], first):
            position = self._positions.get(_key(series))
            if position is not None:
                self._waiting[series_id] = position


def _key(series: Series) -> tuple[str, str, int, int]:
    return series.name, series.quantity, series.micro_step, series.vpp_stage
