"""`trainsentry watch`: shows a run in the terminal."""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from trainsentry.exporters.files.foreign_files import InputError
from trainsentry.exporters.run_reader import RecordedRun, last_anomalies, last_scalars, read_run
from trainsentry.exporters.short_text import counted, number, shorten
from trainsentry.monitor.cli.console import FOUND, bad_input, check_directory, out, without_output

BARS: Final = "▁▂▃▄▅▆▇█"
WIDTH: Final = 44
"""Width of a curve in characters."""

SILENT_SECONDS: Final = 30.0
"""Seconds without a new status after which a running rank is marked; ranks write one every few seconds."""

MAX_RANKS: Final = 16
MAX_INCIDENTS: Final = 4
WORST: Final = 8


def watch_command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The output directory of a run.")],
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two reads of the files.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Show the run once, and exit.")] = False,
) -> None:
    """Show a run in the terminal: steps, loss, incidents, worst series, each rank's health.

    The command only reads files, so it works from another machine on a shared file system, and for a finished run. It
    ends with the run, with exit status 1 if there is an incident. Example: trainsentry watch monitor_output
    """
    try:
        check_directory(directory)
        run = read_run(directory)
        if not run.ranks:
            raise without_output(directory, "rank0/ with status.json in it")
    except InputError as error:
        bad_input(str(error))
    if once or run.is_over or not out.is_terminal:
        out.print(view(run, time.time()))
    else:
        with Live(view(run, time.time()), console=out, screen=True, auto_refresh=False) as live:
            try:
                while not run.is_over:
                    time.sleep(every)
                    run = read_run(directory)
                    live.update(view(run, time.time()), refresh=True)
            except KeyboardInterrupt:
                pass
        out.print(view(run, time.time()))
    if run.incidents:
        raise typer.Exit(FOUND)


def view(run: RecordedRun, now: float) -> RenderableType:
    """Return the view of a run; `now` is in seconds since the epoch."""
    first = next(iter(run.ranks), 0)
    scalars = last_scalars(run.root / f"rank{first}")
    parts: list[RenderableType] = [_head(run), *_curves(scalars)]
    if run.incidents:
        parts += [_incident(incident) for incident in run.incidents[:MAX_INCIDENTS]]
        if len(run.incidents) > MAX_INCIDENTS:
            parts.append(Text(f"and {counted(len(run.incidents) - MAX_INCIDENTS, 'more incident')}", style="dim"))
    elif run.has_steps:
        parts.append(Text("No incident.", style="green"))
    else:
        parts.append(Text("No step was recorded." if run.is_over else "No step was recorded yet.", style="yellow"))
    worst = _worst(run)
    if worst is not None:
        parts.append(worst)
    parts.append(_ranks(run, now))
    return Group(*parts)


def _head(run: RecordedRun) -> Text:
    steps = [status.get("step", -1) for status in run.ranks.values()]
    states = {status.get("state", "no status") for status in run.ranks.values()}
    text = Text.assemble(("trainsentry ", "bold"), str(run.root))
    newest = max(steps, default=-1)
    text.append(f"   {f'step {newest}' if newest >= 0 else 'no step'}   {counted(len(run.ranks), 'rank')}   ")
    text.append(", ".join(sorted(states)), style="bold green" if states == {"running"} else "bold")
    return text


def _curves(scalars: dict[str, list[tuple[int, float]]]) -> list[RenderableType]:
    table = Table.grid(padding=(0, 2))
    for name in ("loss", "learning_rate", "grad_norm", "loss_scale"):
        points = scalars.get(name)
        if points:
            values = [value for _, value in points]
            table.add_row(Text(name, style="bold"), curve(values, WIDTH), Text(f"{values[-1]:.5g}"))
    return [table] if table.row_count else []


def curve(values: Sequence[float], width: int) -> Text:
    """Return values as a line of bars; a bar shows the maximum of its share, a red × a non-finite value.

    >>> curve([1.0, 2.0, 3.0], 3).plain
    '▁▄█'
    """
    good = [value for value in values if math.isfinite(value)]
    low, high = min(good, default=0.0), max(good, default=0.0)
    text = Text()
    bins = min(width, len(values))
    for i in range(bins):
        share = values[i * len(values) // bins : (i + 1) * len(values) // bins]
        finite = [value for value in share if math.isfinite(value)]
        if len(finite) < len(share):
            text.append("×", style="bold red")
            continue
        part = (max(finite) - low) / (high - low) if high > low else 0.0
        text.append(BARS[int(part * (len(BARS) - 1))])
    return text


def _incident(incident: dict[str, Any]) -> Panel:
    body = Text(str(incident.get("summary", "")))
    for position, suspect in enumerate(incident.get("suspects", [])[:3], 1):
        body.append(f"\n{position}. ")
        body.append(str(suspect.get("name")), style="bold")
        body.append(f" {suspect.get('quantity')}, rank {suspect.get('rank')}: {suspect.get('kind')}")
    for action in incident.get("actions", []):
        body.append(f"\n· {action}", style="dim")
    critical = incident.get("severity") == "critical"
    first, last = incident.get("first_seen"), incident.get("last_seen")
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    title = Text(f"incident {incident.get('id')}: {incident.get('severity')}, {steps}")
    return Panel(body, title=title, border_style="red" if critical else "yellow")


def _worst(run: RecordedRun) -> Table | None:
    """Return the series with the highest scores among the newest anomalies."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for rank in list(run.ranks)[:MAX_RANKS]:
        for anomaly in last_anomalies(run.root / f"rank{rank}"):
            key = (rank, anomaly["name"], anomaly["quantity"])
            if key not in found or anomaly.get("score", 0.0) >= found[key].get("score", 0.0):
                found[key] = anomaly
    worst = sorted(found.items(), key=lambda item: -item[1].get("score", 0.0))[:WORST]
    if not worst:
        return None
    table = Table(title="worst series recently", title_justify="left", box=None, padding=(0, 1))
    for column in ("series", "quantity", "rank", "step", "kind", "value", "usual", "score"):
        table.add_column(column, justify="left" if column in {"series", "quantity", "kind"} else "right")
    for (rank, name, quantity), anomaly in worst:
        numbers = [number(anomaly.get(key)) for key in ("value", "expected", "score")]
        where = (Text(shorten(str(name), 26)), Text(str(quantity)), str(rank), str(anomaly["step"]))
        table.add_row(*where, Text(str(anomaly.get("kind"))), *numbers)
    return table


def _ranks(run: RecordedRun, now: float) -> Table:
    table = Table(box=None, padding=(0, 1))
    for column in ("rank", "state", "step", "seen", "anomalies", "overflows", "skipped", "cost", "trouble"):
        table.add_column(column, justify="left" if column in {"state", "trouble"} else "right")
    by_trouble = sorted(run.ranks.items(), key=lambda item: (not _trouble(item[1]), item[0]))
    for rank, status in by_trouble[:MAX_RANKS]:
        age = now - status.get("updated", now)
        silent = status.get("state") == "running" and age > SILENT_SECONDS
        share = status.get("cost", {}).get("recent_share")
        table.add_row(
            str(rank),
            Text(str(status.get("state", "no status")), style="red" if silent else ""),
            str(status.get("step", "")),
            Text(_age(age), style="red" if silent else ""),
            *(str(status.get(key, "")) for key in ("anomalies", "overflow_steps", "skipped_steps")),
            "" if share is None else f"{100 * share:.1f} %",
            Text(_trouble(status), style="yellow"),
        )
    if len(run.ranks) > MAX_RANKS:
        table.caption = f"and {counted(len(run.ranks) - MAX_RANKS, 'more rank')}"
    return table


def _trouble(status: dict[str, Any]) -> str:
    """Return what has failed in the monitor on a rank."""
    parts = [str(gap.get("sink")) for gap in status.get("gaps", []) if isinstance(gap, dict)]
    parts += [str(part) for part in status.get("failures", {})]
    return ", ".join(dict.fromkeys(parts))


def _age(seconds: float) -> str:
    """Format an age in seconds, minutes or hours.

    >>> _age(75.0)
    '1 min'
    """
    if seconds < 60:
        return f"{max(seconds, 0):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
