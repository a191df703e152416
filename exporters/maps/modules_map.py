"""The map that is seen first: modules by steps over all quantities, so that every fault of a run is in one picture."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trainsentry.collectors.series import COMMUNICATION_QUANTITIES
from trainsentry.exporters.incident_groups import worst_first
from trainsentry.exporters.maps.incident_marks import MOST_MARKED, SUSPECTS_EACH, marks
from trainsentry.exporters.maps.layer_matrix import LayerMatrix
from trainsentry.exporters.maps.layers_map import PAGE, LayersMap, RowSpace, furthest, map_of, spread_deviations

_TENSOR: Final = re.compile(r"\.(?:input|output)\.[^.]*(?:\.[^.]*)*$")

_Away = npt.NDArray[np.float32]


def modules_map(
    matrices: Mapping[str, LayerMatrix], incidents: Sequence[Mapping[str, Any]], space: RowSpace = PAGE
) -> LayersMap | None:
    """Return the map of modules over all quantities of `matrices`; None where nothing was seen.

    A cell shows the value furthest from usual among the module's own parameters, gradients, updates, optimizer states
    and activations.
    """
    seen = {q: m for q, m in matrices.items() if q not in COMMUNICATION_QUANTITIES and m.first_step is not None}
    if not seen:
        return None
    modules = _modules(seen)
    rows = [[modules[module_of(name)] for name in matrix.names] for matrix in seen.values()]
    away, steps = furthest_of_rows(list(seen.values()), rows, len(modules))
    return map_of(away, list(modules), steps, _labels(incidents), marks(incidents), space=space)


def furthest_of_rows(
    matrices: Sequence[LayerMatrix], rows: Sequence[Sequence[int]], count: int
) -> tuple[_Away, tuple[int, int]]:
    """Return `count` rows over steps, each with the deviation furthest from usual among the layers that share it.

    `rows` are the rows of each matrix's layers. Returned are the deviations, the first step, and the steps a column.
    """
    first = min(matrix.step_of(0) for matrix in matrices)
    last = max(matrix.last_step for matrix in matrices)
    width = max(matrix.width for matrix in matrices)
    whole = np.full((count, (last - first) // width + 1), np.nan, np.float32)
    for matrix, its_rows in zip(matrices, rows, strict=True):
        _add(whole, matrix, np.asarray(its_rows, np.intp), first, width)
    return _filled(whole), (first, width)


def module_of(name: str) -> str:
    """Return the module of a parameter or an activation.

    >>> module_of("h.3.mlp.weight"), module_of("h.3.mlp.output.0"), module_of("scale")
    ('h.3.mlp', 'h.3.mlp', 'scale')
    """
    short = _TENSOR.sub("", name)
    return short if short != name else name.rpartition(".")[0] or name


def _modules(seen: Mapping[str, LayerMatrix]) -> dict[str, int]:
    """Return the rows of the modules, in the order of the parameters; those without any follow."""
    quantities = sorted(seen, key=lambda q: (q != "parameter", q != "gradient", q != "activation_output"))
    names = dict.fromkeys(module_of(name) for quantity in quantities for name in seen[quantity].names)
    return {name: row for row, name in enumerate(names)}


def _add(whole: _Away, matrix: LayerMatrix, rows: npt.NDArray[np.intp], first: int, width: int) -> None:
    """Lay a matrix over the map; of two values the one further from usual stays."""
    away = spread_deviations(matrix)
    order = np.argsort(rows, kind="stable")
    rows, row_starts = np.unique(rows[order], return_index=True)
    columns = (matrix.step_of(0) - first + np.arange(away.shape[1]) * matrix.width) // width
    columns, column_starts = np.unique(columns, return_index=True)
    part = furthest(furthest(away[order], row_starts, axis=0), column_starts, axis=1)
    at = np.ix_(rows, columns)
    both = np.stack([whole[at], part])
    distance = np.nan_to_num(np.abs(both), nan=-1.0, posinf=np.inf)
    whole[at] = np.where(distance[0] >= distance[1], both[0], both[1])


def _filled(whole: _Away) -> _Away:
    """Repeat each cell over those without a sample behind it; the last step of a run is not sampled in all modules."""
    seen = np.maximum.accumulate(np.where(np.isnan(whole), 0, np.arange(whole.shape[1])), axis=1)
    return np.take_along_axis(whole, seen, axis=1)


def _labels(incidents: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the labels of the modules of suspects: the numbers of their incidents and the quantities."""
    found: dict[str, list[tuple[int, str]]] = {}
    for incident in worst_first(incidents)[:MOST_MARKED]:
        for suspect in incident.get("suspects", ())[:SUSPECTS_EACH]:
            if suspect["name"] != suspect["quantity"]:
                found.setdefault(module_of(suspect["name"]), []).append((incident.get("id", 0), suspect["quantity"]))
    return {
        module: " ".join(dict.fromkeys(f"#{number}" for number, _ in sorted(blamed)))
        for module, blamed in found.items()
    }
