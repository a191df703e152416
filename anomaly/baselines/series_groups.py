"""Groups of series of one kind: they share a score tail, and their common change is taken out of each."""

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
    sensitivity_of,
)
from trainsentry.anomaly.features import FEATURES, MEAN_FEATURE, ZEROS_FEATURE
from trainsentry.collectors.record import as_index
from trainsentry.collectors.series import SeriesTable

SCALARS = "scalars"


class SeriesGroups:
    """Arrays over the series of a table: the number of each one's kind, and its limits of shape (features, n).

    `drifts`: may be judged by slow changes; optimizer state averages over a thousand steps, and does nothing else.
    `fall`: what a size must fall by to be odd, in log units. `is_loss`: the loss; `falls`: what falls with it.
    """

    def __init__(self, table: SeriesTable) -> None:
        self.table = table
        self.names: list[str] = []
        self.of = np.zeros(0, np.int64)
        self.floor = np.zeros((len(FEATURES), 0), np.float32)
        self.jump = np.zeros((len(FEATURES), 0), np.float32)
        self.young = np.zeros(0, np.float32)
        self.drifts = np.zeros(0, bool)
        self.fall = np.zeros(0, np.float32)
        self.falls = np.zeros(0, bool)
        self.is_loss = np.zeros(0, bool)
        self._numbers: dict[str, int] = {}

    def refresh(self) -> None:
        """Take in series that were defined since the last call."""
        new = self.table.series[len(self.of) :]
        if not new:
            return
        rows = [(s, sensitivity_of(s)) for s in new]
        self.of = np.append(self.of, [self.number(SCALARS if s.scalar else s.quantity) for s, _ in rows])
        floors = [_spread(x.floor, MEAN_FLOOR, ZEROS_FLOOR) for _, x in rows]
        self.floor = np.concatenate([self.floor, np.array(floors).T], axis=1)
        means = [MEAN_JUMP if s.quantity in KEEP_THEIR_SIGN else np.inf for s in new]
        jumps = [_spread(float(np.log(x.ratio)), m, ZEROS_JUMP) for (_, x), m in zip(rows, means, strict=True)]
        self.jump = np.concatenate([self.jump, np.array(jumps).T], axis=1)
        self.drifts = np.append(self.drifts, [not s.is_state for s, _ in rows])
        self.is_loss = np.append(self.is_loss, [s.scalar and s.name == "loss" for s in new])
        self.fall = np.append(self.fall, np.array([least_fall_of(s) for s in new], np.float32))
        self.falls = np.append(self.falls, [least_fall_of(s) > 0 and not s.scalar for s in new])
        self.young = np.append(self.young, np.array([x.young for _, x in rows], np.float32))

    def number(self, name: str) -> int:
        """Return the number of a kind, new or known."""
        if name not in self._numbers:
            self._numbers[name] = len(self.names)
            self.names.append(name)
        return self._numbers[name]


def _spread(size: float, mean: float, zeros: float) -> npt.NDArray[np.float32]:
    limits = np.full(len(FEATURES), size, np.float32)
    limits[MEAN_FEATURE], limits[ZEROS_FEATURE] = mean, zeros
    return limits


REMEMBERED: Final = 8
"""Different lists of ids that are remembered: a step may come in parts, and not all steps sample the same."""


@dataclass(frozen=True)
class GroupRows:
    """The rows of a record.

    `where` are the ids as an index, a slice when they are consecutive: that needs no copy. `kind` is the number of each
    row's kind; `groups` are the numbers that there are, in order, with the positions of their rows.
    """

    ids: npt.NDArray[np.int32]
    where: Any
    kind: npt.NDArray[np.int64]
    groups: tuple[tuple[int, npt.NDArray[np.intp]], ...]

    def among(self, wanted: npt.NDArray[np.bool_]) -> list[tuple[int, npt.NDArray[np.intp]]]:
        """Return the groups of wanted rows alone; those of which none is wanted are left out."""
        if wanted.all():
            return list(self.groups)
        found = [(number, rows[wanted[rows]]) for number, rows in self.groups]
        return [(number, rows) for number, rows in found if len(rows)]


class RowsByGroup:
    """Remembers the rows of the last few different lists of ids."""

    def __init__(self, kinds: SeriesGroups) -> None:
        self.kinds = kinds
        self._known: OrderedDict[tuple[int, int, int], GroupRows] = OrderedDict()
        self._last: GroupRows | None = None

    def of(self, ids: npt.NDArray[np.int32]) -> GroupRows:
        """Return the rows of a record that holds these series; a series keeps its kind."""
        if self._last is not None and ids is self._last.ids:
            return self._last
        key = (len(ids), int(ids[0]), int(ids[-1])) if len(ids) else (0, 0, 0)
        found = self._known.get(key)
        if found is None or not np.array_equal(found.ids, ids):
            kind = self.kinds.of[ids]
            numbers = np.flatnonzero(np.bincount(kind)).tolist() if len(kind) else []
            groups = tuple((number, np.flatnonzero(kind == number)) for number in numbers)
            found = self._known[key] = GroupRows(ids, as_index(ids), kind, groups)
        elif found.ids is not ids:
            found = self._known[key] = replace(found, ids=ids)  # the newest: it is asked for several times
        self._last = found
        self._known.move_to_end(key)
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return found
