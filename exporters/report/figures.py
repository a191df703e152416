"""Makes the figures of a report; Bokeh draws them in the browser, without a network."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from bokeh.models import ColumnDataSource, CustomJSHover, CustomJSTickFormatter, HoverTool, LinearColorMapper
from bokeh.models.annotations import Span
from bokeh.plotting import figure

from trainsentry.exporters.short_text import shorten
from trainsentry.exporters.tensorboard.heatmap import STOPS
from trainsentry.exporters.tensorboard.layer_matrix import LayerMatrix, log_shares

MAX_ROWS: Final = 300
"""Rows of a heatmap; with more layers, neighbours share a row that shows their maximum."""

LEVELS: Final = 250
"""Shades of a heatmap; cells are bytes, so that a page stays small."""

_NOT_FINITE: Final = 255
_NOTHING: Final = 254
_GREY: Final = "#888888"
_SUSPECT: Final = "#d62728"
_OTHERS: Final = ("#4c78a8", "#72b7b2", "#9d755d", "#b279a2", "#eeca3b", "#54a24b", "#ff9da6", "#79706e")


def heatmap(matrix: LayerMatrix, incidents: Sequence[int], suspects: Sequence[str]) -> Any:
    """Return layers × steps with a log colour scale; each cell can be read, and the figure zoomed."""
    levels, names, low, high = _levels(matrix)
    rows, columns = levels.shape
    last = matrix.step_of(columns)
    made = _frame("step", "", height=int(min(max(12 * rows + 60, 180), 640)))
    made.y_range.start, made.y_range.end = rows, 0
    made.x_range.start, made.x_range.end = matrix.step_of(0), last
    mapper = LinearColorMapper(palette=_palette(), low=0, high=255)
    box = {"x": matrix.step_of(0), "y": 0, "dw": last - matrix.step_of(0), "dh": rows}
    made.image(image=[levels], color_mapper=mapper, **box)
    value = CustomJSHover(
        args={"low": np.log10(low), "high": np.log10(high)},
        code=f"""if (value == {_NOT_FINITE}) return "not finite"; if (value == {_NOTHING}) return "not sampled";
        return Math.pow(10, low + (high - low) * value / {LEVELS - 1}).toExponential(2);""",
    )
    name = CustomJSHover(args={"names": names}, code="return names[Math.floor(special_vars.y)] || '';")
    made.add_tools(
        HoverTool(
            tooltips=[("layer", "$y{custom}"), ("step", "$x{0}"), ("rms", "@image{custom}")],
            formatters={"$y": name, "@image": value},
        )
    )
    made.yaxis.formatter = CustomJSTickFormatter(
        args={"names": [shorten(n, 28) for n in names]}, code="return names[Math.floor(tick)] || '';"
    )
    for step in incidents:
        made.add_layout(Span(location=step, dimension="height", line_color="#00a0dc", line_dash="dashed"))
    for suspect in suspects:
        if suspect in names:
            made.add_layout(Span(location=names.index(suspect) + 0.5, dimension="width", line_color="#00a0dc"))
    return made


def curves(
    label: str,
    suspect: tuple[str, list[int], list[float]],
    others: Sequence[tuple[str, list[int], list[float]]],
    incidents: Sequence[int],
    *,
    log: bool = True,
) -> Any:
    """Return the suspect's curve, thick, with those of others."""
    made = _frame("step", label, height=300, log=log)
    for i, (label_of_it, its_steps, its_values) in enumerate(others):
        source = _source(label_of_it, its_steps, its_values, log=log)
        line = made.line("x", "y", source=source, color=_OTHERS[i % len(_OTHERS)], alpha=0.7)
        made.add_tools(HoverTool(renderers=[line], tooltips=_SHOWN, visible=False))
    name, steps, values = suspect
    bad = [step for step, value in zip(steps, values, strict=True) if not np.isfinite(value)]
    source = _source(name, steps, values, log=log)
    line = made.line("x", "y", source=source, color=_SUSPECT, line_width=3)
    made.scatter("x", "y", source=source, color=_SUSPECT, size=4)
    made.add_tools(HoverTool(renderers=[line], tooltips=_SHOWN))
    for step in bad[:50]:
        made.add_layout(Span(location=step, dimension="height", line_color="#ff00ff", line_width=2))
    for step in incidents:
        made.add_layout(Span(location=step, dimension="height", line_color="#00a0dc", line_dash="dashed"))
    return made


def _frame(x: str, y: str, *, height: int, log: bool = False) -> Any:
    made = figure(
        height=height,
        sizing_mode="stretch_width",
        x_axis_label=x,
        y_axis_label=y,
        y_axis_type="log" if log else "linear",
        tools="pan,box_zoom,wheel_zoom,reset",
        toolbar_location="above",
        background_fill_alpha=0.0,
        border_fill_alpha=0.0,
        output_backend="canvas",
    )
    made.toolbar.logo = None
    for axis in (*made.xaxis, *made.yaxis):
        axis.axis_label_text_color = axis.major_label_text_color = _GREY
        axis.axis_line_color = axis.major_tick_line_color = axis.minor_tick_line_color = _GREY
    made.grid.grid_line_color = _GREY
    made.grid.grid_line_alpha = 0.25
    made.outline_line_color = None
    return made


_SHOWN: Final = [("", "@name"), ("step", "@x"), ("", "@y")]
"""Names are column values, which Bokeh escapes; in the template itself they would be read as HTML."""


def _source(name: str, steps: Sequence[int], values: Sequence[float], *, log: bool) -> ColumnDataSource:
    x, y = _drawn(steps, values, log=log)
    return ColumnDataSource({"x": x, "y": y, "name": [name] * len(x)})


def _drawn(steps: Sequence[int], values: Sequence[float], *, log: bool) -> tuple[list[int], list[float]]:
    pairs = [(s, v) for s, v in zip(steps, values, strict=True) if np.isfinite(v) and (v > 0 or not log)]
    return [s for s, _ in pairs], [v for _, v in pairs]


def _levels(matrix: LayerMatrix) -> tuple[npt.NDArray[np.uint8], list[str], float, float]:
    """Return the matrix in shades, its rows' names, and the values of the first and the last shade."""
    values, names = matrix.shown(MAX_ROWS)
    shares, low, high = log_shares(values)
    levels = shares * (LEVELS - 1)
    shades = levels.astype(np.uint8)
    shades[np.isnan(values)] = _NOTHING
    shades[np.isinf(values)] = _NOT_FINITE
    return shades, names, low, high


def _palette() -> list[str]:
    """Return 256 colours: the shades, not sampled, and not finite."""
    positions = np.linspace(0, len(STOPS) - 1, LEVELS)
    rgb = np.stack([np.interp(positions, np.arange(len(STOPS)), STOPS[:, c]) for c in range(3)], axis=1).astype(int)
    shades = [f"#{r:02x}{g:02x}{b:02x}" for r, g, b in rgb.tolist()]
    return [*shades, *["#000000"] * (_NOTHING - LEVELS), "#c8c8cc", "#ff00ff"]
