"""The distribution of a suspect's values over the steps: a column a step, a row a bin, coloured by its share."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from bokeh.models import FixedTicker, HoverTool, LinearColorMapper, Range1d
from bokeh.models.annotations import ColorBar

from trainsentry.collectors.histogram import MAGNITUDES
from trainsentry.exporters.maps.layers_map import Mark
from trainsentry.exporters.report.figures import GREY, frame, mark_incidents
from trainsentry.exporters.report.suspect_histograms import StepHistogram, farthest

MAX_COLUMNS: Final = 200
"""Columns of a map: steps, or neighbouring steps together."""

SMALL: Final = 0.01
"""Share of the values whose magnitudes are too small to be told apart in a map: they have the row of 0."""

LOWEST: Final = -6
"""Power of ten of the smallest share that has a colour of its own: one value of a million."""

_LIGHT: Final = (0xA9, 0xDD, 0xD5)
_DARK: Final = (0x08, 0x4F, 0x47)


@dataclass(frozen=True)
class HistogramMap:
    """The shares of a series' values at some steps.

    `shares` has shape (rows, columns), NaN where a bin is empty. Row i is row number `first + i`: 0 for magnitudes
    below `MAGNITUDES[smallest]`, ±1 for the bin from there on, and so outwards.
    """

    steps: list[int]
    first: int
    smallest: int
    shares: npt.NDArray[np.float64]


def histogram_map(found: Sequence[StepHistogram]) -> HistogramMap:
    """Return the map of a series' histograms; of steps that share a column, the one that reaches out most is shown."""
    size = -(-len(found) // MAX_COLUMNS)
    chosen = [farthest(found[i : i + size]) for i in range(0, len(found), size)]
    smallest = _smallest_magnitude(chosen)
    columns = [_rows_of(bins, counts, smallest) for _, (bins, counts) in chosen]
    low, high = min(min(rows) for rows in columns), max(max(rows) for rows in columns)
    shares = np.full((high - low + 1, len(chosen)), np.nan)
    for column, rows in enumerate(columns):
        shares[np.asarray(list(rows)) - low, column] = np.asarray(list(rows.values())) / sum(rows.values())
    return HistogramMap([step for step, _ in chosen], low, smallest, shares)


def _smallest_magnitude(chosen: Sequence[StepHistogram]) -> int:
    """Return the number of the smallest magnitude that has a row of its own."""
    totals = np.zeros(len(MAGNITUDES))
    for _, (bins, counts) in chosen:
        np.add.at(totals, np.abs(bins), np.asarray(counts) / sum(counts))
    totals[0] = 0.0  # zeros have their row in any case
    shares = np.cumsum(totals) / max(totals.sum(), 1e-300)
    return min(max(int(np.searchsorted(shares, SMALL)), 1), len(MAGNITUDES) - 1)


def _rows_of(bins: Sequence[int], counts: Sequence[int], smallest: int) -> dict[int, int]:
    """Return the counts of the rows of a map."""
    rows: dict[int, int] = {}
    for number, count in zip(bins, counts, strict=True):
        row = int(math.copysign(abs(number) - smallest + 1, number)) if abs(number) >= smallest else 0
        rows[row] = rows.get(row, 0) + count
    return rows


def histogram_figure(shown: HistogramMap, marks: list[Mark], axis: Range1d) -> Any:
    """Return the picture of a map; its axis of values is logarithmic on both sides of 0."""
    rows = len(shown.shares)
    made = frame("value", height=360, axis=axis)
    made.y_range = Range1d(start=shown.first - 1.5, end=shown.first + rows + 0.5)
    with np.errstate(divide="ignore"):
        logs = np.log10(shown.shares)
    low = max(math.floor(np.nanmin(logs)), LOWEST)
    high = max(math.ceil(np.nanmax(logs)), low + 1)
    mapper = LinearColorMapper(palette=_palette(), low=low, high=high, nan_color="rgba(0, 0, 0, 0)")
    last = 2 * shown.steps[-1] - shown.steps[-2] if len(shown.steps) > 1 else shown.steps[-1] + 1
    ends = [*shown.steps[1:], last]
    cells = made.image(
        image=[np.ascontiguousarray(logs[:, i : i + 1]) for i in range(len(shown.steps))],
        x=shown.steps,
        y=shown.first - 0.5,
        dw=[end - step for step, end in zip(shown.steps, ends, strict=True)],
        dh=rows,
        color_mapper=mapper,
    )
    made.add_tools(HoverTool(renderers=[cells], tooltips=[("step", "$x{0}"), ("share, power of ten", "@image{0.0}")]))
    _label_values(made, shown)
    made.add_layout(_share_bar(mapper, range(low, high + 1)), "below")
    mark_incidents(made, marks)
    return made


def _palette() -> list[str]:
    shares = np.linspace(0.0, 1.0, 64)[:, None]
    colours = (np.asarray(_LIGHT) * (1 - shares) + np.asarray(_DARK) * shares).astype(int).tolist()
    return [f"#{r:02x}{g:02x}{b:02x}" for r, g, b in colours]


def _label_values(made: Any, shown: HistogramMap) -> None:
    """Label 0 and the powers of ten where they lie between the rows, as many as have room."""
    edges = {0.0: "0"}
    first, last = shown.first, shown.first + len(shown.shares) - 1
    reach = max(-first, last, 1) + shown.smallest - 1
    highest = math.floor(math.log10(MAGNITUDES[min(reach + 1, len(MAGNITUDES) - 1)]))
    lowest = math.ceil(math.log10(MAGNITUDES[shown.smallest]))
    for exponent in range(highest, lowest - 1, -max(1, -(-(highest - lowest + 1) // 4))):
        row = float(np.interp(exponent * math.log(10), _logs(), np.arange(1, len(MAGNITUDES)))) - shown.smallest + 0.5
        edges |= {sign * row: f"{sign * 10.0**exponent:g}" for sign in (1, -1) if first <= sign * row <= last + 0.5}
    made.yaxis.ticker = FixedTicker(ticks=sorted(edges))
    made.yaxis.major_label_overrides = edges
    made.yaxis.minor_tick_line_color = None


def _logs() -> npt.NDArray[np.float64]:
    logs: npt.NDArray[np.float64] = np.log(MAGNITUDES[1:])
    return logs


def _share_bar(mapper: LinearColorMapper, powers: Sequence[int]) -> ColorBar:
    return ColorBar(
        color_mapper=mapper,
        ticker=FixedTicker(ticks=list(powers)),
        major_label_overrides={power: f"{100 * 10.0**power:g} %" for power in powers},
        title="share of the tensor's values; a power of two has four rows",
        title_text_color=GREY,
        title_text_font_size="11px",
        title_text_font_style="normal",
        major_label_text_color=GREY,
        height=10,
        background_fill_alpha=0.0,
    )
