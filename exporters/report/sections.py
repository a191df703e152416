"""Chooses what a report shows, in which order, with captions and links."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from bokeh.models import Range1d

from trainsentry.exporters.maps.incident_marks import first_quantity, marks, suspects
from trainsentry.exporters.maps.layer_matrix import LayerMatrix
from trainsentry.exporters.maps.layers_map import LayersMap, Mark, layers_map
from trainsentry.exporters.maps.map_svg import map_svg
from trainsentry.exporters.maps.modules_map import modules_map
from trainsentry.exporters.maps.ranks_map import deviation_map, ranks_map
from trainsentry.exporters.report.data import MAX_SIBLINGS, ReportData, shown_suspects
from trainsentry.exporters.report.figures import curves, scalar_curve, step_axis, timeline
from trainsentry.exporters.report.histogram_maps import histogram_figure, histogram_map
from trainsentry.exporters.report.suspect_curves import SPOKEN, USUAL, Points, shown_statistic
from trainsentry.exporters.short_text import number

SHOWN_LAYERS: Final = 60
"""Layers in the table below a map."""

SHOWN_SERIES: Final = 16
"""Series of the timeline, those that became abnormal first."""

LAST: Final = 20
"""Values in the table below a curve."""

_MAP: Final = "How far each {} is from its own usual at each step."
_RANKS: Final = "How far each rank is from the median of all ranks at each step."
_RANK_NUMBERS: Final = {"loss": "Loss", "step_seconds": "Step time"}

_VALUES: Final = "Where the suspect's values lie at each step; the axis is logarithmic on both sides of 0."

_DUMP: Final = re.compile(r"dump(?:\.r\d+)?/step\d+(?:/rank\d+)?")


@dataclass(frozen=True)
class ReportFigure:
    """A figure with its caption, and its numbers as a table for readers who cannot see it.

    `figure` is a figure of Bokeh's, or a map: SVG, as the text that `map_svg` makes. `anchor` is its address in the
    page, `part` the part of the page, `keys` the meanings of its colours. `incidents` are the numbers of the incidents
    that it belongs to.
    """

    anchor: str
    part: str
    title: str
    caption: str
    figure: Any
    keys: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[Any, ...], ...] = ()
    incidents: tuple[int, ...] = ()


def figures_of(data: ReportData) -> list[ReportFigure]:
    """Return the figures, the most important first."""
    axis = step_axis(*steps_of(data))
    shown = marks(data.run.incidents)
    scalars, maps = _scalars(data, shown, axis), _maps(data, shown)
    evidence = [*_suspects(data, shown, axis), *_values(data, shown, axis), *_timeline(data, shown, axis)]
    return [*scalars[:1], *maps[:1], *evidence, *_ranks(data), *scalars[1:], *maps[1:]]


def dump_of(incident: Mapping[str, Any], root: Path) -> str | None:
    """Return the folder of an incident's dump below `root`, if it is there."""
    found = (_DUMP.search(str(action)) for action in incident.get("actions", ()))
    return next((match[0] for match in found if match is not None and (root / match[0]).is_dir()), None)


def steps_of(data: ReportData) -> tuple[int, int]:
    """Return the first and the last step of the run."""
    found = [step for steps, _ in data.scalars.values() for step in (steps[:1] + steps[-1:])]
    for matrix in data.matrices.values():
        found += [] if matrix.first_step is None else [matrix.first_step, matrix.last_step]
    return min(found, default=0), max(found, default=1)


def _suspects(data: ReportData, shown: list[Mark], axis: Range1d) -> list[ReportFigure]:
    """Return a curve of every distinct suspect, with sibling layers, and one with other ranks where there are some."""
    found: list[ReportFigure] = []
    for n, suspect in enumerate(shown_suspects(data.run), 1):
        rank, quantity, name = suspect["rank"], suspect["quantity"], suspect["name"]
        statistic = shown_statistic(suspect)
        own = _curve(data, rank, quantity, name, statistic)
        if own is None:
            continue
        blamed = tuple(sorted(_incidents_of(data, rank, quantity, name)))
        label = SPOKEN[statistic] if name != quantity else name
        title = f"{name}: {quantity}, rank {rank}" if name != quantity else f"{name}, rank {rank}"
        siblings = [(s, _curve(data, rank, quantity, s, statistic)) for s in data.siblings(rank, quantity, name)]
        ranks = [(f"rank {r}", _curve(data, r, quantity, name, statistic)) for r in data.run.ranks if r != rank]
        newest = list(zip(*own, strict=True))[-LAST:]
        rows = tuple((step, number(value)) for step, value in newest)
        for group, others in (("layers of the same kind", siblings), ("the same layer on other ranks", ranks)):
            behind = [(other, points) for other, points in others if points is not None][:MAX_SIBLINGS]
            if not behind and group != "layers of the same kind":
                continue
            figure = curves(label, (name, own), behind, shown, axis, log=statistic != "mean" and name != quantity)
            keys = ("suspect", *(("others",) if behind else ()), "incident", "bad")
            caption = f"The {label} of the suspect" + (f", with {group}." if behind else ".")
            anchor = f"curve-{n}" if group.startswith("layers") else f"curve-{n}-ranks"
            part = "Suspects"
            found.append(ReportFigure(anchor, part, title, caption, figure, keys, ("step", label), rows, blamed))
    return found


def _values(data: ReportData, shown: list[Mark], axis: Range1d) -> list[ReportFigure]:
    """Return the distribution of every distinct suspect's values, where its histograms were recorded."""
    found: list[ReportFigure] = []
    for n, suspect in enumerate(shown_suspects(data.run), 1):
        rank, quantity, name = suspect["rank"], suspect["quantity"], suspect["name"]
        histograms = data.histograms.get((rank, quantity), {}).get(name)
        if histograms:
            title = f"{name}: values of {quantity}, rank {rank}"
            figure = histogram_figure(histogram_map(histograms), shown, axis)
            found.append(ReportFigure(f"values-{n}", "Suspects", title, _VALUES, figure, ("incident",)))
    return found


def _curve(data: ReportData, rank: int, quantity: str, name: str, statistic: str) -> Points | None:
    """Return a series in a statistic; where only its size was kept, its root mean square."""
    if name == quantity:
        return data.scalars.get(name)
    found = data.curves.get((rank, quantity, statistic), {}).get(name)
    return found if found is not None or statistic != USUAL else data.curve(rank, quantity, name)


def _incidents_of(data: ReportData, rank: int, quantity: str, name: str) -> set[int]:
    return {
        incident.get("id", 0)
        for incident in data.run.incidents
        for s in incident.get("suspects", [])[:2]
        if (s["rank"], s["quantity"], s["name"]) == (rank, quantity, name)
    }


def _scalars(data: ReportData, shown: list[Mark], axis: Range1d) -> list[ReportFigure]:
    found = []
    for name in ("loss", "grad_norm", "learning_rate", "loss_scale"):
        steps, values = data.scalars.get(name, ([], []))
        if len(set(values)) > 1:  # a constant needs no curve
            rows = tuple((step, number(value)) for step, value in list(zip(steps, values, strict=True))[-LAST:])
            figure = scalar_curve(name, (steps, values), shown, axis)
            keys = ("smoothed", "raw", "incident", "bad")
            found.append(ReportFigure(f"scalar-{name}", "Curves", name, "", figure, keys, ("step", name), rows))
    return found


def _ranks(data: ReportData) -> list[ReportFigure]:
    """Return the maps of ranks by steps: loss, step time, and the deviations of the ranks' layers."""
    part, found = "Ranks by steps", []
    for name, spoken in _RANK_NUMBERS.items():
        curves_of = data.rank_scalars.get(name, {})
        if len(curves_of) > 1:
            drawn = ranks_map(curves_of, data.run.incidents)
            found.append(_map(f"ranks-{name}", part, f"{spoken}: ranks by steps", _RANKS, drawn))
    ranks = {rank for rank, _ in data.matrices}
    quantities = [q for q in {q: None for _, q in data.matrices} if all((rank, q) in data.matrices for rank in ranks)]
    if len(ranks) > 1 and quantities:
        drawn = deviation_map(
            {rank: [data.matrices[rank, q] for q in quantities] for rank in sorted(ranks)}, data.run.incidents
        )
        caption = f"Of each rank's layers the one furthest from its own usual ({', '.join(quantities)})."
        found.append(_map("ranks-deviation", part, "Deviation: ranks by steps", caption, drawn))
    return found


def _map(
    anchor: str, part: str, title: str, caption: str, drawn: LayersMap, rows: tuple[tuple[Any, ...], ...] = ()
) -> ReportFigure:
    columns = ("layer", "median", "newest", "highest", "at step") if rows else ()
    svg = map_svg(drawn, f"{title}. {caption}")
    return ReportFigure(anchor, part, title, f"{caption} Drag to zoom, hover to read.", svg, (), columns, rows)


def _maps(data: ReportData, shown: list[Mark]) -> list[ReportFigure]:
    first = next(iter(data.matrices), (0, ""))[0]
    matrices = {q: m for (rank, q), m in data.matrices.items() if rank == first and m.names and _seen(m).max() > 0}
    wanted = first_quantity(data.run.incidents, list(matrices))
    blamed = [s["quantity"] for i in data.run.incidents for s in i.get("suspects", [])]
    order = sorted(matrices, key=lambda q: (q != wanted, blamed.index(q) if q in blamed else len(blamed)))
    whole = modules_map(matrices, data.run.incidents)
    part, found = "Layers by steps", []
    if whole is not None:
        found.append(_map("map", part, f"All quantities: modules by steps, rank {first}", _MAP.format("module"), whole))
    for quantity in order:
        matrix = matrices[quantity]
        drawn = layers_map(matrix, suspects(data.run.incidents, quantity), shown)
        title = f"{quantity}: layers by steps, rank {first}"
        found.append(_map(f"map-{quantity}", part, title, _MAP.format("layer"), drawn, _layer_rows(matrix)))
    return found


def _seen(matrix: LayerMatrix) -> Any:
    """Return the sizes that were seen, 0 where there are none; a table of step counters has none that matter."""
    table = matrix.table()
    return table[~np.isnan(table)] if (~np.isnan(table)).any() else np.zeros(1)


def _timeline(data: ReportData, shown: list[Mark], axis: Range1d) -> list[ReportFigure]:
    """Return the abnormal values as dots, the series that became abnormal first on top."""
    found: dict[tuple[int, str, str], list[tuple[int, float, bool]]] = {}
    for a in data.anomalies:
        key = a.get("rank", 0), a["quantity"], a["name"]
        value = a.get("value")
        found.setdefault(key, []).append((a["step"], a.get("score") or 0.0, value is not None and np.isfinite(value)))
    if not found:
        return []
    blamed = {(s["rank"], s["quantity"], s["name"]) for s in shown_suspects(data.run)}
    several = len(data.run.ranks) > 1
    series = [
        (f"{name} {quantity}" + (f" r{rank}" if several else ""), (rank, quantity, name) in blamed, values)
        for (rank, quantity, name), values in list(found.items())[:SHOWN_SERIES]
    ]
    more = len(found) - len(series)
    caption = "Abnormal values from the first one on; the series that became abnormal first is on top."
    caption += f" {more} more series follow." if more else ""
    figure = timeline(series, shown, axis)
    title, keys = "What became abnormal, in order", ("suspect", "others", "bad", "incident")
    return [ReportFigure("timeline", "Timeline", title, caption, figure, keys)]


def _layer_rows(matrix: LayerMatrix) -> tuple[tuple[Any, ...], ...]:
    """Return the layers of a picture as numbers, first those whose newest value is furthest from their median."""
    rows = []
    for layer, values in zip(matrix.names, matrix.table(), strict=True):
        seen = np.flatnonzero(~np.isnan(values))
        if not len(seen):
            continue
        middle, newest, peak = float(np.median(values[seen])), float(values[seen[-1]]), int(np.nanargmax(values))
        highest = float(values[peak])
        with np.errstate(divide="ignore", invalid="ignore"):
            away = np.nan_to_num(np.abs(np.log(np.float64(newest) / middle)), nan=0.0, posinf=np.inf)
        shown = [number(x) if np.isfinite(x) else "not finite" for x in (middle, newest, highest)]
        rows.append((np.inf if np.isinf(highest) else away, (layer, *shown, matrix.step_of(peak))))
    rows.sort(key=lambda item: -item[0])
    return tuple(row for _, row in rows[:SHOWN_LAYERS])
