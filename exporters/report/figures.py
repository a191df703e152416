"""Makes the figures of a report; Bokeh draws them in the browser, without a network.

One colour has one meaning on the whole page: red is the suspect, grey are others, blue dashes are incidents, magenta is
what was not finite. All figures share their axis of steps, so that zooming one zooms all.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from bokeh.models import (
    ColumnDataSource,
    CustomJS,
    FixedTicker,
    HoverTool,
    Range1d,
)
from bokeh.models.annotations import Label, Span
from bokeh.plotting import figure

from trainsentry.exporters.maps.layers_map import Mark
from trainsentry.exporters.report.suspect_curves import Points, thin
from trainsentry.exporters.short_text import shorten

SUSPECT: Final = "#d62728"
OTHERS: Final = "#8f9aa6"
INCIDENT: Final = "#0086c0"
BAD: Final = "#d600d6"
SMOOTH: Final = "#2f9e2f"
"""The colours of the page: the suspect, others, incidents, not finite, a scalar that was smoothed."""

LONGEST: Final = 24
"""Characters of a name beside a figure, so that a telephone has room for the data."""

SMOOTHED: Final = 0.85
"""Share of the past in a smoothed value: lightly, over some seven steps."""

OTHERS_POINTS: Final = 300
"""Points of the curve of a layer that is no suspect, so that the page stays small."""

MOST_BAD: Final = 50
"""Values that were not finite and have a line in a curve."""

GREY: Final = "#888888"
"""Axes and their texts, on light and on dark pages."""


def step_axis(first: int, last: int) -> Range1d:
    """Return the axis of steps that all figures of a page share, and the maps, which are no figures of Bokeh's."""
    room = max((last - first) * 0.01, 0.5)
    made = Range1d(start=first - room, end=last + room, bounds=(first - 2 * room, last + 2 * room))
    moved = CustomJS(
        code="for (const map of document.querySelectorAll('.map-svg')) showSteps(map, cb_obj.start, cb_obj.end);"
    )
    for end in ("start", "end"):
        made.js_on_change(end, moved)
    return made


def curves(
    label: str,
    suspect: tuple[str, Points],
    others: Sequence[tuple[str, Points]],
    marks: Sequence[Mark],
    axis: Range1d,
    *,
    log: bool = True,
) -> Any:
    """Return the suspect's curve, thick, with those of others behind it."""
    made = frame(label, height=280, axis=axis, log=log)
    for name, points in others:
        source = _source(name, thin(dict(zip(*points, strict=True)), OTHERS_POINTS), log=log)
        line = made.line("x", "y", source=source, color=OTHERS, alpha=0.7)
        made.add_tools(HoverTool(renderers=[line], tooltips=_SHOWN, visible=False))
    name, points = suspect
    source = _source(name, points, log=log)
    line = made.line("x", "y", source=source, color=SUSPECT, line_width=2.5)
    made.scatter("x", "y", source=source, color=SUSPECT, size=4)
    made.add_tools(HoverTool(renderers=[line], tooltips=_SHOWN))
    _mark_bad(made, points)
    mark_incidents(made, marks)
    return made


def scalar_curve(name: str, points: Points, marks: Sequence[Mark], axis: Range1d) -> Any:
    """Return a logged scalar: lightly smoothed, with the raw values behind it."""
    made = frame(name, height=260, axis=axis)
    raw = _source(name, points, log=False)
    made.line("x", "y", source=raw, color=OTHERS, alpha=0.55)
    steps, values = _drawn(points, log=False)
    smooth = ColumnDataSource({"x": steps, "y": smoothed(values), "name": [name] * len(steps)})
    line = made.line("x", "y", source=smooth, color=SMOOTH, line_width=2)
    made.add_tools(HoverTool(renderers=[line], tooltips=_SHOWN))
    _mark_bad(made, points)
    mark_incidents(made, marks)
    return made


def timeline(
    series: Sequence[tuple[str, bool, list[tuple[int, float, bool]]]], marks: Sequence[Mark], axis: Range1d
) -> Any:
    """Return abnormal values as dots, a series a row, the first abnormal one on top.

    A series is its name, whether it is a suspect, and its abnormal values as step, score and whether it was finite.
    """
    names = [shorten(name, LONGEST + 6) for name, _, _ in series]
    made = frame("", height=22 * len(series) + 90, axis=axis)
    made.y_range = Range1d(start=len(series) - 0.4, end=-0.6)
    made.yaxis.ticker = FixedTicker(ticks=list(range(len(series))))
    made.yaxis.major_label_overrides = dict(enumerate(names))
    points = [
        (step, row, name, score, BAD if not finite else SUSPECT if blamed else OTHERS)
        for row, (name, blamed, values) in enumerate(series)
        for step, score, finite in values
    ]
    columns = [list(column) for column in zip(*points, strict=True)]
    source = ColumnDataSource(dict(zip(("x", "y", "name", "score", "colour"), columns, strict=True)))
    dots = made.scatter("x", "y", source=source, color="colour", size=9, alpha=0.85)
    made.add_tools(HoverTool(renderers=[dots], tooltips=[("", "@name"), ("step", "@x"), ("score", "@score{0.0}")]))
    mark_incidents(made, marks)
    return made


def smoothed(values: Sequence[float]) -> list[float]:
    """Return an exponential mean that begins at the first value.

    >>> [round(x, 3) for x in smoothed([1.0, 1.0, 2.0])]
    [1.0, 1.0, 1.15]
    """
    found: list[float] = []
    for value in values:
        found.append(value if not found else SMOOTHED * found[-1] + (1 - SMOOTHED) * value)
    return found


def _mark_bad(made: Any, points: Points) -> None:
    bad = [step for step, value in zip(*points, strict=True) if not np.isfinite(value)]
    for step in bad[:MOST_BAD]:
        made.add_layout(Span(location=step, dimension="height", line_color=BAD, line_width=2))


def mark_incidents(made: Any, marks: Sequence[Mark]) -> None:
    """Draw each incident as a dashed line with its number at the foot."""
    for i, mark in enumerate(marks):
        made.add_layout(Span(location=mark.step, dimension="height", line_color=INCIDENT, line_dash="dashed"))
        made.add_layout(
            Label(
                x=mark.step, y=2 + 12 * (i % 3), x_offset=3, y_units="screen", text=mark.label.split()[0],
                text_color=INCIDENT, text_font_size="11px",
            )
        )  # fmt: skip


def frame(label: str, *, height: int, axis: Range1d, log: bool = False) -> Any:
    """Return an empty figure in the style of the page."""
    made: Any = figure(
        height=height,
        sizing_mode="stretch_width",
        x_range=axis,
        x_axis_label="step",
        y_axis_label=label,
        y_axis_type="log" if log else "linear",
        tools="box_zoom,pan,wheel_zoom,reset",
        active_drag="box_zoom",
        active_scroll=None,
        toolbar_location="above",
        background_fill_alpha=0.0,
        border_fill_alpha=0.0,
        output_backend="canvas",
    )
    made.toolbar.logo = None
    made.xaxis.ticker.desired_num_ticks = 5  # a telephone has no room for more
    made.xaxis.formatter.use_scientific = False
    for part in (*made.xaxis, *made.yaxis):
        part.axis_label_text_color = part.major_label_text_color = GREY
        part.axis_label_text_font_style = "normal"
        part.axis_line_color = part.major_tick_line_color = part.minor_tick_line_color = GREY
    made.grid.grid_line_color = GREY
    made.grid.grid_line_alpha = 0.25
    made.outline_line_color = None
    return made


_SHOWN: Final = [("", "@name"), ("step", "@x"), ("", "@y")]
"""Names are column values, which Bokeh escapes; in the template itself they would be read as HTML."""


def _source(name: str, points: Points, *, log: bool) -> ColumnDataSource:
    x, y = _drawn(points, log=log)
    return ColumnDataSource({"x": x, "y": y, "name": [name] * len(x)})


def _drawn(points: Points, *, log: bool) -> Points:
    """Return the points that an axis can show."""
    pairs = [(s, v) for s, v in zip(*points, strict=True) if np.isfinite(v) and (v > 0 or not log)]
    return [s for s, _ in pairs], [v for _, v in pairs]
