"""Writes the report of a run: one HTML file that opens without a network."""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jinja2
import numpy as np
from bokeh.embed import components
from bokeh.resources import Resources

from trainsentry.collectors.series import writable
from trainsentry.exporters.engine import Mapper, map_locally
from trainsentry.exporters.files.foreign_files import Report
from trainsentry.exporters.report.data import ReportData, gather
from trainsentry.exporters.report.figures import curves, heatmap
from trainsentry.exporters.short_text import flat, number
from trainsentry.exporters.tensorboard.layer_matrix import LayerMatrix

MAX_BYTES: Final = 5 * 2**20
SHOWN_ANOMALIES: Final = 40
SHOWN_RANKS: Final = 64
SHOWN_LAYERS: Final = 60


@dataclass(frozen=True)
class ReportFigure:
    """A figure with its caption, and its numbers as a table for readers who cannot see it."""

    title: str
    caption: str
    figure: Any
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[Any, ...], ...] = ()


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
    figures = [*_suspects(data), *_scalars(data), *_heatmaps(data)]
    text = _render(data, figures)
    while len(text.encode()) > MAX_BYTES and figures:
        figures.pop()  # the least important figures come last
        text = _render(data, figures)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
    return path


def _render(data: ReportData, figures: list[ReportFigure]) -> str:
    script, divs = components([shown.figure for shown in figures]) if figures else ("", [])
    folder = Path(__file__).parent
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string((folder / "page.html.jinja").read_text(encoding="utf-8"))
    text: str = page.render(
        run=data.run,
        incidents=data.run.incidents,
        anomalies=data.anomalies[:SHOWN_ANOMALIES],
        more_anomalies=data.more_anomalies + max(0, len(data.anomalies) - SHOWN_ANOMALIES),
        figures=list(zip(figures, divs, strict=True)),
        ranks=list(data.run.ranks.items())[:SHOWN_RANKS],
        more_ranks=max(0, len(data.run.ranks) - SHOWN_RANKS),
        settings=flat(data.run.settings.get("configuration", {})),
        facts=_facts(data),
        script=script,
        bokeh=Resources(mode="inline", components=["bokeh"]).render_js() if figures else "",
        number=number,
        made=time.strftime("%Y-%m-%d %H:%M"),
    )
    return writable(text)


def _marks(data: ReportData) -> list[int]:
    return sorted({incident["first_seen"] for incident in data.run.incidents[:8] if "first_seen" in incident})


def _suspects(data: ReportData) -> list[ReportFigure]:
    """Return the curves of the first suspects, with those of sibling layers and of other ranks."""
    shown: list[ReportFigure] = []
    seen: set[tuple[int, str, str]] = set()
    for incident in data.run.incidents[:3]:
        for suspect in incident.get("suspects", [])[:2]:
            rank, quantity, name = suspect["rank"], suspect["quantity"], suspect["name"]
            curve_of_suspect = data.curve(rank, quantity, name)
            if curve_of_suspect is None or (rank, quantity, name) in seen:
                continue
            seen.add((rank, quantity, name))
            siblings = [(s, data.curve(rank, quantity, s)) for s in data.siblings(rank, quantity, name)]
            ranks = [(f"rank {r}", data.curve(r, quantity, name)) for r in data.run.ranks if r != rank]
            title = f"{name}: {quantity}, rank {rank}"
            for group, found in (("layers of the same kind", siblings), ("the same layer on other ranks", ranks)):
                others = [(label, *curve) for label, curve in found if curve is not None]
                if others or group.startswith("layers"):
                    figure = curves("root mean square", (name, *curve_of_suspect), others, _marks(data))
                    caption = f"The suspect (red, thick) and {group}; magenta: not finite, dashed: an incident."
                    newest = list(zip(*curve_of_suspect, strict=True))[-20:]
                    rows = tuple((step, number(value)) for step, value in newest)
                    shown.append(ReportFigure(title, caption, figure, ("step", "root mean square"), rows))
    return shown


def _scalars(data: ReportData) -> list[ReportFigure]:
    shown = []
    for name in ("loss", "grad_norm", "learning_rate", "loss_scale"):
        if name in data.scalars:
            steps, values = data.scalars[name]
            figure = curves(name, (name, steps, values), [], _marks(data), log=False)
            rows = tuple((step, number(value)) for step, value in list(zip(steps, values, strict=True))[-20:])
            shown.append(ReportFigure(name, "Dashed: an incident.", figure, ("step", name), rows))
    return shown


def _heatmaps(data: ReportData) -> list[ReportFigure]:
    names = [str(s["name"]) for incident in data.run.incidents[:3] for s in incident.get("suspects", [])[:3]]
    order = [str(s["quantity"]) for incident in data.run.incidents for s in incident.get("suspects", [])]
    first = next(iter(data.matrices), (0, ""))[0]
    found = [(quantity, matrix) for (rank, quantity), matrix in data.matrices.items() if rank == first and matrix.names]
    found.sort(key=lambda item: order.index(item[0]) if item[0] in order else len(order))
    caption = "Root mean square of a layer at a step, log colour; magenta: not finite. Drag to zoom, hover to read."
    return [
        ReportFigure(
            f"{quantity}: layers by steps, rank {first}",
            caption,
            heatmap(matrix, _marks(data), names),
            ("layer", "median", "newest", "highest", "at step"),
            _layer_rows(matrix),
        )
        for quantity, matrix in found
    ]


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
