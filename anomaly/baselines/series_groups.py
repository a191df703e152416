"""Groups of like series: they share a score tail, and their common change is taken out of each."""

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trainsentry.anomaly.baselines.thresholds import (
    KEEP_THEIR_SIGN,
    MEAN_FLOOR,
    MEAN_JUMP,
    ZEROS_FLOOR,
    ZEROS_JUMP,
    least_fall_of,
    thresholds_of,
)
from trainsentry.anomaly.features import FEATURES, MEAN_FEATURE, ZEROS_FEATURE
from trainsentry.anomaly.series_arrays import Columns, Floats, Integers, Mask, SeriesArrays, rows_where
from trainsentry.collectors.record import as_index
from trainsentry.collectors.series import UPDATE, Series

SCALARS = "scalars"
"""The group of all logged scalars; every other group is named for its quantity."""


class SeriesGroups:
    """The group of each series, and its prior thresholds.

    `names` are the groups by number, and `columns` the columns over them.
    """

    def __init__(self, arrays: SeriesArrays) -> None:
        self.names: list[str] = []
        self.columns = Columns(self.names)
        self._numbers: dict[str, int] = {}
        series, features = arrays.series, (len(FEATURES),)
        self._group = series.column(np.int64, of=lambda s: self.number(SCALARS if s.scalar else s.quantity))
        self._floor = series.column(np.float32, of=_floors, shape=features)
        self._jump = series.column(np.float32, of=_jumps, shape=features)
        self._young = series.column(np.float32, of=lambda s: thresholds_of(s).young)
        self._least_fall = series.column(np.float32, of=least_fall_of)
        self._falls_with_loss = series.column(bool, of=lambda s: least_fall_of(s) > 0 and not s.scalar)
        self._drifts = series.column(bool, of=lambda s: not s.is_state)
        self._is_loss = series.column(bool, of=lambda s: s.scalar and s.name == "loss")
        self._is_model_input = series.column(bool, of=lambda s: s.is_model_input)
        self._may_fade = series.column(bool, of=lambda s: s.quantity == UPDATE or (s.scalar and s.name == "loss"))

    @property
    def of(self) -> Integers:
        """The number of each series' group."""
        return self._group.values

    @property
    def floor(self) -> Floats:
        """Least deviation of each feature, shape (features, series)."""
        return self._floor.values

    @property
    def is_model_input(self) -> Mask:
        """Whether a series is data."""
        return self._is_model_input.values

    @property
    def jump(self) -> Floats:
        """Least jump of each feature, shape (features, series)."""
        return self._jump.values

    @property
    def young(self) -> Floats:
        """Added to the deviation of a young series, divided by its samples."""
        return self._young.values

    @property
    def least_fall(self) -> Floats:
        """Least fall of a size that is odd, in log units."""
        return self._least_fall.values

    @property
    def falls_with_loss(self) -> Mask:
        """Series that may fall further as the loss falls."""
        return self._falls_with_loss.values

    @property
    def drifts(self) -> Mask:
        """Series judged by slow changes; optimizer state averages over a thousand steps and always changes slowly."""
        return self._drifts.values

    @property
    def may_fade(self) -> Mask:
        """Series whose slow fall is no drift: the loss, whose fall training is for, and updates.

        An update fades as its gradient does. Three of nine false alarms of clean runs were such drifts (seeds 227 and
        229), and the first suspect of no fault of the open list was.
        """
        return self._may_fade.values

    @property
    def is_loss(self) -> Mask:
        """The loss."""
        return self._is_loss.values

    def number(self, name: str) -> int:
        """Return the number of a group, new or known."""
        if name not in self._numbers:
            self._numbers[name] = len(self.names)
            self.names.append(name)
        return self._numbers[name]


def _floors(series: Series) -> npt.NDArray[np.float32]:
    return _by_feature(thresholds_of(series).floor, MEAN_FLOOR, ZEROS_FLOOR)


def _jumps(series: Series) -> npt.NDArray[np.float32]:
    mean = MEAN_JUMP if series.quantity in KEEP_THEIR_SIGN else np.inf
    return _by_feature(float(np.log(thresholds_of(series).ratio)), mean, ZEROS_JUMP)


def _by_feature(size: float, mean: float, zeros: float) -> npt.NDArray[np.float32]:
    limits = np.full(len(FEATURES), size, np.float32)
    limits[MEAN_FEATURE], limits[ZEROS_FEATURE] = mean, zeros
    return limits


REMEMBERED: Final = 8
"""Different lists of ids that are remembered: a step may come in parts, and steps sample different series."""


@dataclass(frozen=True)
class GroupRows:
    """The rows of a record by group.

    `where` are the ids as an index, a slice when they are consecutive: a slice makes no copy. `group` is the number of
    each row's group; `groups` are the numbers that occur, in order, with the positions of their rows.
    """

    ids: npt.NDArray[np.int32]
    where: Any
    group: Integers
    groups: tuple[tuple[int, npt.NDArray[np.intp]], ...]

    def among(self, wanted: Mask) -> list[tuple[int, npt.NDArray[np.intp]]]:
        """Return the groups with their wanted rows; groups without one are left out."""
        if wanted.all():
            return list(self.groups)
        found = [(number, rows[wanted[rows]]) for number, rows in self.groups]
        return [(number, rows) for number, rows in found if len(rows)]


class RowsByGroup:
    """Remembers the rows by group of the last few different lists of ids."""

    def __init__(self, groups: SeriesGroups) -> None:
        self.groups = groups
        self._known: OrderedDict[tuple[int, int, int], GroupRows] = OrderedDict()
        self._last: GroupRows | None = None

    def of(self, ids: npt.NDArray[np.int32]) -> GroupRows:
        """Return the rows by group of a record with these series; a series keeps its group."""
        if self._last is not None and ids is self._last.ids:
            return self._last
        key = (len(ids), int(ids[0]), int(ids[-1])) if len(ids) else (0, 0, 0)
        found = self._known.get(key)
        if found is None or not np.array_equal(found.ids, ids):
            group = self.groups.of[ids]
            numbers = rows_where(np.bincount(group)).tolist() if len(group) else []
            groups = tuple((number, rows_where(group == number)) for number in numbers)
            found = self._known[key] = GroupRows(ids, as_index(ids), group, groups)
        elif found.ids is not ids:
            found = self._known[key] = replace(found, ids=ids)  # the newest record asks several times
        self._last = found
        self._known.move_to_end(key)
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return found
