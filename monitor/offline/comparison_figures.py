"""Makes the figures of two runs laid over each other; Bokeh draws them in the browser, without a network."""

from collections.abc import Collection, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from bokeh.layouts import column
from bokeh.models import (
    ColumnDataSource,
    CustomJSHover,
    CustomJSTickFormatter,
    FixedTicker,
    HoverTool,
    LinearColorMapper,
    Range1d,
)
from bokeh.models.annotations import ColorBar, Span
from bokeh.plotting import figure

from trainsentry.exporters.live.series_points import SeriesPoints
from trainsentry.exporters.maps.layer_matrix import LayerMatrix
from trainsentry.exporters.short_text import first_of, shorten

A: Final = "#4c8fd6"
B: Final = "#e2762b"
_APART: Final = "#b04a9a"
_FIRST: Final = "#d0312d"
_GREY: Final = "#888888"

MAX_ROWS: Final = 200
"""Rows of a map; with more layers, neighbours share a row that shows their maximum."""

SHADES: Final = 250
DECADES: Final = (-6.0, 3.0)
"""Relative differences of the first and the last colour, as powers of ten: what counts as equal, and a thousandfold."""


def two_curves(a: SeriesPoints, b: SeriesPoints, marks: Sequence[int], axis: Any) -> Any:
    """Return both curves over steps and, below, the size of their difference where both have a step, on a log scale.

    `axis` is the range of steps of an earlier figure, to share, or None.
    """
    above = _frame(axis, height=240)
    for points, label, colour, dash in ((a, "A", A, "solid"), (b, "B", B, [6, 3])):
        good = np.isfinite(points.values)
        source = ColumnDataSource({"x": points.steps[good], "y": points.values[good], "run": [label] * int(good.sum())})
        line = above.line("x", "y", source=source, color=colour, line_width=2, line_dash=dash, legend_label=label)
        above.add_tools(HoverTool(renderers=[line], tooltips=[("run", "@run"), ("step", "@x"), ("", "@y")]))
        for step in points.steps[~good][:50].tolist():
            above.add_layout(Span(location=step, dimension="height", line_color="#d400d4", line_width=1))
    legend = above.legend[0]
    legend.orientation, legend.location = "horizontal", "top_right"
    legend.background_fill_alpha, legend.border_line_alpha, legend.label_text_color = 0.0, 0.0, _GREY
    below = _frame(above.x_range, height=150, log=True)
    below.toolbar_location = None
    steps, sizes = apart(a, b)
    source = ColumnDataSource({"x": steps, "y": sizes})
    line = below.line("x", "y", source=source, color=_APART, line_width=1.5)
    below.scatter("x", "y", source=source, color=_APART, size=3)
    below.yaxis.axis_label = "|A − B|"
    below.xaxis.axis_label = "step"
    below.add_tools(HoverTool(renderers=[line], tooltips=[("step", "@x"), ("|A − B|", "@y")]))
    _mark((above, below), marks)
    return column(above, below, sizing_mode="stretch_width")


def apart(a: SeriesPoints, b: SeriesPoints) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return the steps at which two series differ, and by how much.

    Curves that were thinned have different steps; there only those that both kept are compared.
    """
    last_a = dict(zip(a.steps.tolist(), a.values.tolist(), strict=True))
    last_b = dict(zip(b.steps.tolist(), b.values.tolist(), strict=True))
    steps = np.asarray(sorted(last_a.keys() & last_b.keys()), np.int64)
    sizes = np.asarray([abs(last_a[s] - last_b[s]) for s in steps.tolist()], np.float64)
    some = np.isfinite(sizes) & (sizes > 0)
    return steps[some], sizes[some]


def _shown(matrix: LayerMatrix) -> tuple[npt.NDArray[np.float32], list[str]]:
    """Return the matrix for a picture, and its rows' names.

    A column without samples repeats the last one. With more than `MAX_ROWS` layers, neighbours share a row that holds
    their maximum.
    """
    table, names = matrix.table(), matrix.names
    sampled = ~np.isnan(table).all(axis=0)
    table = table[:, np.maximum.accumulate(np.where(sampled, np.arange(table.shape[1]), 0))]
    group = -(-len(table) // MAX_ROWS)
    if group <= 1:
        return table, list(names)
    starts = np.arange(0, len(table), group)
    with np.errstate(invalid="ignore"):
        grouped = np.fmax.reduceat(table, starts, axis=0)
    return grouped, [first_of(names[first : first + group]) for first in starts.tolist()]


def difference_map(matrix: LayerMatrix, suspects: Collection[str], marks: Sequence[int]) -> Any:
    """Return layers by steps, coloured by the logarithm of the relative difference, with a colour bar."""
    values, names = _shown(matrix)
    rows, columns = values.shape
    low, high = DECADES
    with np.errstate(divide="ignore", invalid="ignore"):
        share = (np.log10(values) - low) / (high - low)
    shades = (np.clip(np.nan_to_num(share, nan=0.0, posinf=1.0, neginf=0.0), 0, 1) * (SHADES - 1)).astype(np.uint8)
    shades[np.isnan(values)] = 253
    shades[values == 0] = 254
    shades[np.isinf(values)] = 255
    made = _frame(None, height=int(min(max(14 * rows + 90, 200), 640)))
    first, last = matrix.step_of(0), matrix.step_of(columns)
    made.x_range.start, made.x_range.end = first, last
    made.y_range = Range1d(start=rows, end=0)
    mapper = LinearColorMapper(
        palette=[*_shades(), *["#000000"] * 3, "#00000000", "#9a9aa040", "#d400d4"], low=0, high=255
    )
    box = {"x": first, "y": 0, "dw": last - first, "dh": rows}
    made.image(image=[shades], color_mapper=mapper, **box)
    name = CustomJSHover(args={"names": names}, code="return names[Math.floor(special_vars.y)] || '';")
    value = CustomJSHover(
        args={"low": low, "high": high},
        code=f"""if (value >= 253) return ["not in both", "equal", "not finite"][value - 253];
        return Math.pow(10, low + (high - low) * value / {SHADES - 1}).toExponential(1);""",
    )
    tooltips = [("layer", "$y{custom}"), ("step", "$x{0}"), ("relative difference", "@image{custom}")]
    made.add_tools(HoverTool(tooltips=tooltips, formatters={"$y": name, "@image": value}))
    labels = [f"▸ {shorten(n, 28)}" if n in suspects else shorten(n, 30) for n in names]
    made.yaxis.formatter = CustomJSTickFormatter(args={"names": labels}, code="return names[Math.floor(tick)] || '';")
    own = [i + 0.5 for i, n in enumerate(names) if n in suspects]
    every = max(1, -(-rows // 35))
    others = [i + 0.5 for i in range(0, rows, every) if all(abs(i + 0.5 - o) >= every for o in own)]
    made.yaxis.ticker = FixedTicker(ticks=sorted({*own, *others}))
    _colour_bar(made)
    _mark((made,), marks)
    made.xaxis.axis_label = "step"
    return made


def _colour_bar(made: Any) -> None:
    low, high = DECADES
    ticks = [low, -3.0, 0.0, high]
    bar = ColorBar(
        color_mapper=LinearColorMapper(palette=_shades(), low=low, high=high),
        ticker=FixedTicker(ticks=ticks),
        major_label_overrides={t: f"1e{int(t)}" for t in ticks},
        title="relative difference",
        width=12,
        background_fill_alpha=0.0,
        major_label_text_color=_GREY,
        title_text_color=_GREY,
    )
    made.add_layout(bar, "right")


def _shades() -> list[str]:
    """Return colours from pale blue to dark red, that differ in lightness on white and on black."""
    stops = np.asarray([[150, 190, 220], [240, 200, 90], [230, 110, 40], [160, 20, 40]])
    at = np.linspace(0, len(stops) - 1, SHADES)
    rgb = np.stack([np.interp(at, np.arange(len(stops)), stops[:, c]) for c in range(3)], axis=1).astype(int)
    return [f"#{r:02x}{g:02x}{b:02x}" for r, g, b in rgb.tolist()]


def _mark(figures: Sequence[Any], marks: Sequence[int]) -> None:
    """Mark the steps at which the runs first differ."""
    for made in figures:
        for step in marks:
            line = Span(location=step, dimension="height", line_color=_FIRST, line_dash="dashed", line_width=1.5)
            made.add_layout(line)


def _frame(axis: Any, *, height: int, log: bool = False) -> Any:
    made = figure(
        height=height,
        sizing_mode="stretch_width",
        y_axis_type="log" if log else "linear",
        tools="box_zoom,pan,wheel_zoom,reset",
        active_drag="box_zoom",
        toolbar_location="above",
        background_fill_alpha=0.0,
        border_fill_alpha=0.0,
        output_backend="canvas",
        **({"x_range": axis} if axis is not None else {}),
    )
    made.toolbar.logo = None
    for line in (*made.xaxis, *made.yaxis):
        line.axis_label_text_color = line.major_label_text_color = _GREY
        line.axis_line_color = line.major_tick_line_color = line.minor_tick_line_color = _GREY
    made.grid.grid_line_color = _GREY
    made.grid.grid_line_alpha = 0.25
    made.outline_line_color = None
    return made
