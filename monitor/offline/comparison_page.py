"""Writes the page of two runs laid over each other: one HTML file that opens without a network."""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jinja2
from bokeh.embed import components
from bokeh.resources import Resources

from trainsentry.anomaly.dumps.dump_comparison import renamed
from trainsentry.collectors.series import writable
from trainsentry.exporters.csv.format import SCALARS
from trainsentry.exporters.csv.reader import rank_directories, table_files
from trainsentry.exporters.files.foreign_files import InputError, Report
from trainsentry.exporters.files.json_files import replace_text
from trainsentry.exporters.live.series_points import SeriesPoints, points_of
from trainsentry.exporters.run_reader import read_run
from trainsentry.exporters.short_text import flat, number
from trainsentry.monitor.offline.comparison_figures import difference_map, two_curves
from trainsentry.monitor.offline.two_runs import SeriesDifference, TwoRuns

SHOWN_SERIES: Final = 60
"""Series of the page's table."""

SHOWN_CURVES: Final = 5
"""Series, besides the loss, whose curves are drawn; of one table at most two, as its others look alike."""

SHOWN_MAPS: Final = 3
SHOWN_SETTINGS: Final = 100


@dataclass(frozen=True)
class _Shown:
    """A figure with its title and caption."""

    title: str
    caption: str
    figure: Any


def write_comparison(
    path: Path, a: Path, b: Path, found: TwoRuns, names: Mapping[str, str], report: Report = lambda *_: None
) -> None:
    """Write the page of runs `a` and `b`, which were compared, to `path`; `names` as in `compare_runs`.

    Raises:
        OSError: when it cannot be written.

    """
    curves = _curves(a, b, found, names, report)
    figures = [*curves[:2], *_maps(found), *curves[2:]]
    script, divs = components([shown.figure for shown in figures]) if figures else ("", [])
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    source = Path(__file__).with_name("comparison.html.jinja").read_text(encoding="utf-8")
    runs = [read_run(root, report) for root in (a, b)]
    settings = [dict(flat(run.settings.get("configuration", {}))) for run in runs]
    changed = [(k, settings[0].get(k, "–"), settings[1].get(k, "–")) for k in sorted({*settings[0], *settings[1]})]
    text = environment.from_string(source).render(
        a=a,
        b=b,
        found=found,
        first=found.series[0] if found.series else None,
        series=found.series[:SHOWN_SERIES],
        more_series=max(0, len(found.series) - SHOWN_SERIES),
        figures=list(zip(figures, divs, strict=True)),
        incidents=[run.incidents[0].get("summary", "") if run.incidents else "no incident" for run in runs],
        settings=[row for row in changed if row[1] != row[2]][:SHOWN_SETTINGS],
        script=script,
        bokeh=Resources(mode="inline", components=["bokeh"]).render_js() if figures else "",
        number=number,
        made=time.strftime("%Y-%m-%d %H:%M"),
    )
    replace_text(path, writable(text))


def _curves(a: Path, b: Path, found: TwoRuns, names: Mapping[str, str], report: Report) -> list[_Shown]:
    """Return the loss of both runs, and the series that differ first; they share the axis of steps."""
    ranks = rank_directories(a), rank_directories(b)
    wanted: list[tuple[str, str, str, str]] = []
    first_rank = found.series[0].rank if found.series else next(r for r in ranks[0] if r in ranks[1])
    wanted.append((first_rank, SCALARS, "loss", "value"))
    of_table: Counter[str] = Counter()
    for s in found.series:
        of_table[s.table] += 1
        if of_table[s.table] <= 2:
            wanted.append((s.rank, s.table, s.name, s.statistic))
    shown: list[_Shown] = []
    axis = None
    marks = _marks(found)
    for rank, table, name, statistic in dict.fromkeys(wanted):
        points = (
            _points(ranks[0].get(rank), table, name, statistic, report),
            _points(ranks[1].get(rank), table, renamed(name, names), statistic, report),
        )
        if not all(len(p.steps) for p in points):
            continue
        both = two_curves(points[0], points[1], marks, axis)
        axis = axis or both.children[0].x_range
        title = f"{name}{'' if table == SCALARS else f': {statistic} of its {table}'}, {rank}"
        shown.append(_Shown(title, "Above both runs, below the size of their difference on a log scale.", both))
        if len(shown) > SHOWN_CURVES:
            break
    return shown


def _marks(found: TwoRuns) -> list[int]:
    if not found.series:
        return []
    return sorted({found.series[0].first, min(s.first for s in found.series)})


def _points(directory: Path | None, table: str, name: str, statistic: str, report: Report) -> SeriesPoints:
    try:
        files = table_files(directory).get(table, []) if directory is not None else []
    except InputError:
        files = []
    return points_of(files, name, statistic, report)


def _named(origin: SeriesDifference | None, table: str) -> set[str]:
    """Return the name to point out in a table's map: the series that differs first, in its own table."""
    return {origin.name} if origin is not None and origin.table == table else set()


def _maps(found: TwoRuns) -> list[_Shown]:
    """Return, for the tables that differ first, each layer's largest relative difference at each step."""
    order = dict.fromkeys((s.rank, s.table) for s in found.series if (s.rank, s.table) in found.maps)
    origin = found.series[0] if found.series else None
    caption = "The largest relative difference of a layer's statistics, log colours; grey: equal, magenta: not finite."
    return [
        _Shown(
            f"{table}: layers by steps, {rank}",
            caption,
            difference_map(found.maps[rank, table], _named(origin, table), _marks(found)),
        )
        for rank, table in list(order)[:SHOWN_MAPS]
    ]
