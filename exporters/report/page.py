"""Writes the report of a run: one HTML file that opens without a network."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final
from urllib.parse import quote

import jinja2
from bokeh.embed import components
from bokeh.resources import Resources

from trainsentry.collectors.series import writable
from trainsentry.exporters.engine import Mapper, map_locally
from trainsentry.exporters.files.foreign_files import Report
from trainsentry.exporters.files.json_files import replace_text
from trainsentry.exporters.maps.map_svg import map_script, map_style
from trainsentry.exporters.report.data import ReportData, gather
from trainsentry.exporters.report.figures import BAD, INCIDENT, OTHERS, SMOOTH, SUSPECT, step_axis
from trainsentry.exporters.report.module_tree import module_tree
from trainsentry.exporters.report.sections import ReportFigure, dump_of, figures_of, steps_of
from trainsentry.exporters.short_text import flat, number

MAX_BYTES: Final = 5 * 2**20
SHOWN_ANOMALIES: Final = 40
SHOWN_RANKS: Final = 64
SHOWN_INCIDENTS: Final = 100
"""Incidents in the table."""

TOLD_INCIDENTS: Final = 8
"""Incidents whose suspects are told, the worst."""

COLOURS: Final = {
    "suspect": (SUSPECT, "the suspect"),
    "others": (OTHERS, "others"),
    "incident": (INCIDENT, "incident"),
    "bad": (BAD, "not finite"),
    "smoothed": (SMOOTH, "smoothed"),
    "raw": (OTHERS, "raw"),
}
"""The meanings of the colours."""


def write_report(
    root: Path,
    out: Path | None = None,
    report: Report = lambda *_: None,
    progress: Callable[[str], None] = lambda _: None,
    mapper: Mapper = map_locally,
) -> Path:
    """Write the report of the run in `root` to `out` (`root/report.html`); return its path.

    Raises:
        InputError: when `root` holds no output of trainsentry.

    """
    path = out or root / "report.html"
    data = gather(root, report, progress, mapper)
    figures = figures_of(data)
    text = _render(data, figures, path.parent)
    while len(text.encode()) > MAX_BYTES and figures:
        figures.pop()  # the least important figures come last
        text = _render(data, figures, path.parent)
    replace_text(path, text)
    return path


def _render(data: ReportData, figures: list[ReportFigure], page_folder: Path) -> str:
    script, divs = _embedded(figures)
    axis = step_axis(*steps_of(data))
    folder = Path(__file__).parent
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string((folder / "page.html.jinja").read_text(encoding="utf-8"))
    text: str = page.render(
        run=data.run,
        incidents=data.run.incidents,
        by_number=sorted(data.run.incidents, key=lambda incident: incident.get("id", 0))[:SHOWN_INCIDENTS],
        told=[incident.get("id") for incident in data.run.incidents[:TOLD_INCIDENTS]],
        curve_of=_curves_of_incidents(figures),
        dump_of={i.get("id"): _link(dump_of(i, data.run.root), data.run.root, page_folder) for i in data.run.incidents},
        colours=COLOURS,
        anomalies=data.anomalies[:SHOWN_ANOMALIES],
        more_anomalies=data.more_anomalies + max(0, len(data.anomalies) - SHOWN_ANOMALIES),
        parts=_parts(list(zip(figures, divs, strict=True))),
        ranks=list(data.run.ranks.items())[:SHOWN_RANKS],
        more_ranks=max(0, len(data.run.ranks) - SHOWN_RANKS),
        settings=flat(data.run.settings.get("configuration", {})),
        facts=_facts(data),
        tree=module_tree(data.run, data.anomalies),
        script=script,
        bokeh=Resources(mode="inline", components=["bokeh"]).render_js() if script else "",
        steps=(axis.start, axis.end),
        map_style=map_style(),
        map_script=map_script(),
        number=number,
        made=time.strftime("%Y-%m-%d %H:%M"),
    )
    return writable(text)


def _embedded(figures: list[ReportFigure]) -> tuple[str, list[str]]:
    """Return the script that draws Bokeh's figures, and the element of each figure; a map is its own."""
    drawn = [shown.figure for shown in figures if not isinstance(shown.figure, str)]
    script, divs = components(drawn) if drawn else ("", ())
    places = iter(divs)
    return script, [shown.figure if isinstance(shown.figure, str) else next(places) for shown in figures]


def _parts(figures: list[tuple[ReportFigure, str]]) -> list[tuple[str, list[tuple[ReportFigure, str]]]]:
    """Return the figures by part of the page; the first two stand under the verdict."""
    first, rest = figures[:2], figures[2:]
    parts: dict[str, list[tuple[ReportFigure, str]]] = {"At a glance": first} if first else {}
    for shown in rest:
        parts.setdefault(shown[0].part, []).append(shown)
    return list(parts.items())


def _curves_of_incidents(figures: list[ReportFigure]) -> dict[int, list[tuple[str, str]]]:
    """Return the addresses and titles of each incident's curves."""
    found: dict[int, list[tuple[str, str]]] = {}
    for shown in figures:
        for number_of_incident in shown.incidents:
            found.setdefault(number_of_incident, []).append((shown.anchor, shown.title))
    return found


def _link(dump: str | None, root: Path, page: Path) -> tuple[str, str] | None:
    """Return a folder's address as the page sees it, and its name."""
    return None if dump is None else (quote(os.path.relpath(root / dump, page).replace(os.sep, "/")) + "/", dump)


def _facts(data: ReportData) -> list[tuple[str, str]]:
    settings = data.run.settings
    versions = settings.get("versions", {})
    facts = [(f"{settings.get('framework', 'framework')}", str(settings.get("framework_version", "")))]
    facts += [(str(name), str(version)) for name, version in versions.items()]
    facts += [("device", str(settings.get("accelerator", ""))), ("ranks", str(settings.get("world_size", "")))]
    facts += [("hosts", ", ".join(map(str, settings.get("hosts", []))))]
    started = settings.get("start_time")
    if started is not None:
        facts.append(("started", _moment(started)))
    return facts


def _moment(seconds: float) -> str:
    """Format a time in seconds since the epoch; a time outside the calendar stays a number."""
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return number(seconds)


if __name__ == "__main__":
    write_report(Path(sys.argv[1]))
