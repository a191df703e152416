"""Makes the figures of a report; Bokeh draws them in the browser, without a network.

One colour has one meaning on the whole page: red is the suspect, grey are others, blue dashes are incidents, magenta is
what was not finite. All figures share their axis of steps, so that zooming one zooms all.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from bokeh.models import (
    ColumnDataSource,
    CustomJSHover,
    FixedTicker,
    HoverTool,
    LinearColorMapper,
    Range1d,
)
from bokeh.models.annotations import ColorBar, Label, Span
from bokeh.plotting import figure

from trainsentry.exporters.report.suspect_curves import Points, thin
from trainsentry.exporters.short_text import shorten
from trainsentry.exporters.tensorboard.layers_map import (
    NEUTRAL,
    NOT_FINITE,
    NOT_KNOWN,
    LayersMap,
    Mark,
    bar_texts,
    named_rows,
    palette,
)

SUSPECT: Final = "#d62728"
OTHERS: Final = "#8f9aa6"
INCIDENT: Final = "#0086c0"
BAD: Final = "#d600d6"
SMOOTH: Final = "#1b998b"
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

_STRIP: Final = 44
"""Pixels above a map for the labels of incidents, in three lines."""


def step_axis(first: int, last: int) -> Range1d:
    """Return the axis of steps that all figures of a page share."""
    room = max((last - first) * 0.01, 0.5)
    return Range1d(start=first - room, end=last + room, bounds=(first - 2 * room, last + 2 * room))


def map_figure(shown: LayersMap, axis: Range1d) -> Any:
    """Return the map of layers by steps; each cell can be read, and the figure zoomed."""
    tops = np.concatenate([[0], np.cumsum(shown.pixels)])
    height = int(tops[-1])
    made = frame("", height=height + _STRIP + 110, axis=axis)
    made.y_range = Range1d(start=height, end=-_STRIP)
    made.ygrid.visible = False
    colours = [f"#{r:02x}{g:02x}{b:02x}" for r, g, b in palette().tolist()]
    rows = len(shown.names)
    source = ColumnDataSource(
        {
            "image": [shown.levels[row : row + 1] for row in range(rows)],
            "y": tops[:-1].tolist(),
            "dh": list(shown.pixels),
            "name": list(shown.names),
        }
    )
    cells = made.image(
        image="image",
        x=shown.first_step,
        y="y",
        dw=shown.last_step - shown.first_step,
        dh="dh",
        source=source,
        color_mapper=LinearColorMapper(palette=colours, low=0, high=255),
    )
    value = CustomJSHover(
        args={"limit": shown.limit},
        code=f"""if (value == {NOT_FINITE}) return "not finite"; if (value == {NOT_KNOWN}) return "usual not known yet";
        return ((value - {NEUTRAL}) / {NEUTRAL} * limit).toFixed(1);""",
    )
    tips = [("layer", "@name"), ("step", "$x{0}"), ("robust deviations", "@image{custom}")]
    made.add_tools(HoverTool(renderers=[cells], tooltips=tips, formatters={"@image": value}))
    _name_rows(made, shown, tops)
    _label_marks(made, shown.marks)
    made.add_layout(_colour_bar(shown, colours), "below")
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


def _name_rows(made: Any, shown: LayersMap, tops: Any) -> None:
    ticks = {}
    for row in named_rows(shown, 12):
        name = shorten(shown.names[row], LONGEST)
        ticks[float(tops[row] + tops[row + 1]) / 2] = (
            f"{name} {shown.suspects[row]} ▶" if row in shown.suspects else name
        )
    made.yaxis.ticker = FixedTicker(ticks=sorted(ticks))
    made.yaxis.major_label_overrides = ticks
    made.yaxis.major_label_text_font_size = "11px"
    made.yaxis.minor_tick_line_color = None


def _label_marks(made: Any, marks: Sequence[Mark]) -> None:
    """Draw each incident as a labelled line above the data; nothing covers the data."""
    late = made.x_range.start + 0.7 * (made.x_range.end - made.x_range.start)
    for i, mark in enumerate(marks):
        y = -_STRIP + 7 + 14 * (i % 3)
        left = mark.step > late  # a telephone has no room to the right
        made.segment(x0=[mark.step], x1=[mark.step], y0=[y - 6], y1=[-1], color=INCIDENT, line_width=2)
        made.text(
            x=[mark.step], y=[y], text=[mark.label], x_offset=-4 if left else 4, text_align="right" if left else "left",
            text_color=INCIDENT, text_font_size="11px", text_baseline="middle",
        )  # fmt: skip


def _colour_bar(shown: LayersMap, colours: list[str]) -> ColorBar:
    texts = {1.0: f"≥ +{shown.limit:.3g}", -1.0: f"≤ -{shown.limit:.3g}"}
    ticks: dict[Any, Any] = {
        NEUTRAL + NEUTRAL * share: texts.get(share, text) for share, text in bar_texts(shown.limit)
    }
    return ColorBar(
        color_mapper=LinearColorMapper(palette=colours[: 2 * NEUTRAL + 1], low=0, high=2 * NEUTRAL),
        ticker=FixedTicker(ticks=sorted(ticks)),
        major_label_overrides=ticks,
        title="robust deviations from the layer's own usual",
        title_text_color=GREY,
        title_text_font_size="11px",
        title_text_font_style="normal",
        major_label_text_color=GREY,
        height=10,
        background_fill_alpha=0.0,
    )


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
