"""Holds the rows of one table at one step as arrays; numbers refer to names and layouts, which are stored once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from trainsentry.exporters.files.foreign_files import InputError

Ids = npt.NDArray[np.int64]
Texts = npt.NDArray[np.object_]

MAX_KEYS: Final = 1 << 19
"""Distinct rows (name, model chunk, micro-step) of a table; a model of 100,000 layers reaches this in five micro-steps.
Each takes some kilobytes where its history is kept."""


class RowKey(NamedTuple):
    """Identifies a row within a step. `scope` is empty except in tables that hold several quantities.

    `micro_step` is -1 in msprobe tables without such a column.
    """

    vpp_stage: int
    name: str
    micro_step: int
    scope: str = ""


class RowKeys:
    """Numbers keys and layouts (shape and dtype as written) in the order they first appear."""

    def __init__(self) -> None:
        self.keys: list[RowKey] = []
        self.layouts: list[tuple[str, str]] = []
        self._key_ids: dict[RowKey, int] = {}
        self._layout_ids: dict[tuple[str, str], int] = {}

    def key_id(self, key: RowKey) -> int:
        """Return the number of a key.

        Raises:
            InputError: when there are more than MAX_KEYS keys.

        """
        found = self._key_ids.get(key)
        if found is None:
            if len(self.keys) >= MAX_KEYS:
                raise InputError(f"the table has more than {MAX_KEYS} different rows a step")
            found = self._key_ids[key] = len(self.keys)
            self.keys.append(key)
        return found

    def layout_id(self, layout: tuple[str, str]) -> int:
        """Return the number of a layout.

        Raises:
            InputError: when there are more than MAX_KEYS layouts.

        """
        found = self._layout_ids.get(layout)
        if found is None:
            if len(self.layouts) >= MAX_KEYS:
                raise InputError(f"the table has more than {MAX_KEYS} different shapes and dtypes")
            found = self._layout_ids[layout] = len(self.layouts)
            self.layouts.append(layout)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class TableRows:
    """Rows of one table and one step in file order.

    `keys`, `orders` and `layouts` have shape (n,), `values` (n, len(numbers)) in float64; `numbers` are the columns'
    names. `restart` is the number of the start that wrote them. `histograms`, shape (n,), are the texts of that column,
    None without one.
    """

    step: int
    restart: int
    numbers: tuple[str, ...]
    keys: Ids
    orders: Ids
    layouts: Ids
    values: npt.NDArray[np.float64]
    histograms: Texts | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def select(
        self, rows: "npt.NDArray[np.intp] | npt.NDArray[np.bool_] | slice", step: int | None = None
    ) -> "TableRows":
        """Return some of the rows, labelled with `step` if given."""
        return TableRows(
            self.step if step is None else step,
            self.restart,
            self.numbers,
            self.keys[rows],
            self.orders[rows],
            self.layouts[rows],
            self.values[rows],
            self.histograms[rows] if self.histograms is not None else None,
        )

    def newest(self) -> "TableRows":
        """Return the last row of each key."""
        backwards = self.keys[::-1]
        _, first = np.unique(backwards, return_index=True)
        if len(first) == len(self.keys):
            return self
        return self.select(np.sort(len(self.keys) - 1 - first))


def by_step(rows: TableRows, steps: Ids) -> Iterator[TableRows]:
    """Split rows of several steps (`steps`, shape (n,)) by step, ascending; rows keep their order within a step."""
    if len(steps) > 1 and bool((np.diff(steps) < 0).any()):
        order = np.argsort(steps, kind="stable")
        rows, steps = rows.select(order), steps[order]
    cuts = [0, *(np.flatnonzero(np.diff(steps)) + 1).tolist(), len(steps)]
    for begin, end in pairwise(cuts):
        if end > begin:
            yield rows.select(slice(begin, end), step=int(steps[begin]))


def joined(parts: Sequence[TableRows]) -> TableRows:
    """Concatenate parts of one step."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    histograms = [p.histograms for p in parts if p.histograms is not None]
    return TableRows(
        first.step,
        first.restart,
        first.numbers,
        np.concatenate([p.keys for p in parts]),
        np.concatenate([p.orders for p in parts]),
        np.concatenate([p.layouts for p in parts]),
        np.concatenate([p.values for p in parts]),
        np.concatenate(histograms) if len(histograms) == len(parts) else None,
    )
