"""Which rows of a record are of which kind: found once, for records hold the same series again and again."""

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trainsentry.anomaly.kinds import Kinds
from trainsentry.collectors.record import as_index

REMEMBERED: Final = 8
"""Different lists of ids that are remembered: a step may come in parts, and not all steps sample the same."""


@dataclass(frozen=True)
class Rows:
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


class RowsByKind:
    """Remembers the rows of the last few different lists of ids."""

    def __init__(self, kinds: Kinds) -> None:
        self.kinds = kinds
        self._known: OrderedDict[tuple[int, int, int], Rows] = OrderedDict()
        self._last: Rows | None = None

    def of(self, ids: npt.NDArray[np.int32]) -> Rows:
        """Return the rows of a record that holds these series; a series keeps its kind."""
        if self._last is not None and ids is self._last.ids:
            return self._last
        key = (len(ids), int(ids[0]), int(ids[-1])) if len(ids) else (0, 0, 0)
        found = self._known.get(key)
        if found is None or not np.array_equal(found.ids, ids):
            kind = self.kinds.of[ids]
            numbers = np.flatnonzero(np.bincount(kind)).tolist() if len(kind) else []
            groups = tuple((number, np.flatnonzero(kind == number)) for number in numbers)
            found = self._known[key] = Rows(ids, as_index(ids), kind, groups)
        elif found.ids is not ids:
            found = self._known[key] = replace(found, ids=ids)  # the newest: it is asked for several times
        self._last = found
        self._known.move_to_end(key)
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return found
