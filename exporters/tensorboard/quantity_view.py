"""Summarises one quantity over all its layers: a few numbers per step, and its pictures."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tensorboard.compat.proto.summary_pb2 import Summary

from trainsentry.exporters.csv.format import elements_of, parse_shape
from trainsentry.exporters.csv.table_rows import RowKeys, TableRows
from trainsentry.exporters.maps.incident_marks import marks, suspects
from trainsentry.exporters.maps.layer_matrix import MAX_COLUMNS, LayerMatrix
from trainsentry.exporters.maps.layers_map import layers_map
from trainsentry.exporters.maps.map_png import map_png
from trainsentry.exporters.tensorboard.values import histogram, image

SUMMARY: Final = ("norm_of_all", "rms_max", "rms_median", "rms_min", "not_finite")
"""Numbers over all layers: the norm of all elements, maximum, median and minimum of the layers' root mean squares, and
the count of NaN and Inf. The root mean square does not depend on a layer's size, so layers compare."""


def summary_tag(quantity: str, number: str) -> str:
    """Return the tag of a number over all layers.

    >>> summary_tag("gradient", "rms_max")
    'layers.gradient/rms_max'
    """
    return f"layers.{quantity}/{number}"


_ALL: Final = slice(None)


class LayoutSizes:
    """The number of elements of each layout of a table, parsed from the shapes."""

    def __init__(self, keys: RowKeys) -> None:
        self.keys = keys
        self._sizes: list[float] = []

    def all(self) -> npt.NDArray[np.float64]:
        """Return the elements of each layout so far."""
        for shape, _ in self.keys.layouts[len(self._sizes) :]:
            self._sizes.append(float(elements_of(parse_shape(shape))))
        return np.asarray(self._sizes)


class QuantityView:
    """Keeps the matrix and the newest values of one quantity."""

    def __init__(self, quantity: str, columns: int = MAX_COLUMNS) -> None:
        self.quantity = quantity
        self.matrix = LayerMatrix(columns)
        self._last = np.empty(0)

    def take(
        self,
        step: int,
        rows: npt.NDArray[np.intp],
        norms: npt.NDArray[np.float64],
        sizes: npt.NDArray[np.float64],
        bad: npt.NDArray[np.float64],
    ) -> list[float]:
        """Add the layers of a step and return the numbers of `SUMMARY`.

        `rows` (in the matrix), `norms`, `sizes` (elements) and `bad` (counts of NaN and Inf) have shape (n,).
        """
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            rms = norms / np.sqrt(sizes)
            total = float(np.sqrt(np.nansum(norms * norms)))
        self.matrix.take(step, rows, np.where(bad > 0, np.inf, rms))
        self._last = rms[np.isfinite(rms) & (sizes > 0)]
        if not self._last.size:
            return [total, np.nan, np.nan, np.nan, float(bad.sum())]
        return [total, float(self._last.max()), float(np.median(self._last)), float(self._last.min()), float(bad.sum())]

    def take_rows(
        self,
        rows: TableRows,
        sizes: npt.NDArray[np.float64],
        layers: npt.NDArray[np.intp],
        at: "npt.NDArray[np.intp] | slice" = _ALL,
    ) -> list[float]:
        """Add the rows `at` of a table's step; layouts have `sizes` elements, `layers` are the rows in the matrix."""
        bad = np.zeros(len(layers))
        for name in ("nans", "infs"):
            if name in rows.numbers:
                bad += np.nan_to_num(rows.values[at, rows.numbers.index(name)])
        norms = rows.values[at, rows.numbers.index("norm")]
        return self.take(rows.step, layers, norms, sizes[rows.layouts[at]], bad)

    def copy(self) -> "QuantityView":
        """Return a copy that stays as it is while this view goes on."""
        made = QuantityView(self.quantity, 0)
        made.matrix, made._last = self.matrix.copy(), self._last
        return made

    def pictures(self, incidents: Sequence[Mapping[str, Any]] = ()) -> list[Summary.Value]:
        """Return the map of layers by steps, and the log-scale histogram of the last step's layers.

        `incidents` are lines of `incidents.jsonl`; the map marks them and their suspects.
        """
        if not self.matrix.names:
            return []
        shown = layers_map(self.matrix, suspects(incidents, self.quantity), marks(incidents))
        values = [image(f"heatmaps/{self.quantity}", *map_png(shown))]
        positive = self._last[self._last > 0]
        if positive.size:
            values.append(histogram(f"layers.{self.quantity}/log10_rms", np.log10(positive)))
        return values


def overview(quantities: Sequence[str]) -> dict[str, dict[str, list[str]]]:
    """Return the layout of the custom scalars page: category → chart → patterns of tags."""
    charts = {
        "loss": ["scalars/loss"],
        "learning rate": ["scalars/learning_rate"],
        "norm of all gradients": ["layers\\.gradient/norm_of_all", "scalars/grad_norm"],
        "incidents so far": ["scalars/incidents"],
        "values that are not finite": ["layers\\..*/not_finite"],
        "share of time that the monitor takes": ["scalars/monitor_share"],
    }
    layers = {
        quantity: [f"layers\\.{quantity}/rms_{which}" for which in ("max", "median", "min")] for quantity in quantities
    }
    return {"Overview": charts, "Layers: largest, median, smallest": layers}
