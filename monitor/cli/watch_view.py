"""What `trainsentry watch` shows."""

import math
from collections.abc import Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from trainsentry.exporters.run_reader import RecordedRun, last_anomalies, last_scalars
from trainsentry.exporters.short_text import number, shorten

BARS: Final = "▁▂▃▄▅▆▇█"
WIDTH: Final = 44
"""Characters of a curve."""

SILENT_SECONDS: Final = 30.0
"""A running rank that has not renewed its status for so long gets a mark; it does so every few seconds."""

MAX_RANKS: Final = 16
MAX_INCIDENTS: Final = 4
WORST: Final = 8


def view(run: RecordedRun, now: float) -> RenderableType:
    """Return a picture of a run; `now` is in seconds since the epoch."""
    first = next(iter(run.ranks), 0)
    scalars = last_scalars(run.root / f"rank{first}")
    parts: list[RenderableType] = [_head(run), *_curves(scalars)]
    if run.incidents:
        parts += [_incident(incident) for incident in run.incidents[:MAX_INCIDENTS]]
        if len(run.incidents) > MAX_INCIDENTS:
            parts.append(Text(f"and {len(run.incidents) - MAX_INCIDENTS} more incidents", style="dim"))
    else:
        parts.append(Text("No incident.", style="green"))
    worst = _worst(run)
    if worst is not None:
        parts.append(worst)
    parts.append(_ranks(run, now))
    return Group(*parts)


def _head(run: RecordedRun) -> Text:
    steps = [status.get("step", -1) for status in run.ranks.values()]
    states = {status.get("state", "no status") for status in run.ranks.values()}
    text = Text.assemble(("trainsentry ", "bold"), str(run.root))
    text.append(f"   step {max(steps, default=-1)}   {len(run.ranks)} rank{'s' * (len(run.ranks) != 1)}   ")
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
    """Return values as a line of bars; each bar is the largest of its share, and red where one is not finite.

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
    for place, suspect in enumerate(incident.get("suspects", [])[:3], 1):
        body.append(f"\n{place}. ")
        body.append(str(suspect.get("name")), style="bold")
        body.append(f" {suspect.get('quantity')}, rank {suspect.get('rank')}: {suspect.get('kind')}")
    for action in incident.get("actions", []):
        body.append(f"\n· {action}", style="dim")
    critical = incident.get("severity") == "critical"
    title = f"incident {incident.get('id')}: {incident.get('severity')}, steps {incident.get('first_seen')} to "
    return Panel(body, title=Text(f"{title}{incident.get('last_seen')}"), border_style="red" if critical else "yellow")


def _worst(run: RecordedRun) -> Table | None:
    """Return the series with the strongest evidence against them among the newest anomalies."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for rank in list(run.ranks)[:MAX_RANKS]:
        for anomaly in last_anomalies(run.root / f"rank{rank}"):
            key = (rank, anomaly["name"], anomaly["quantity"])
            if key not in found or anomaly.get("score", 0.0) >= found[key].get("score", 0.0):
                found[key] = anomaly
    worst = sorted(found.items(), key=lambda item: -item[1].get("score", 0.0))[:WORST]
    if not worst:
        return None
    table = Table(title="worst series of late", title_justify="left", box=None, padding=(0, 1))
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
        table.caption = f"and {len(run.ranks) - MAX_RANKS} more ranks"
    return table


def _trouble(status: dict[str, Any]) -> str:
    """Return what has failed in the monitor on a rank."""
    parts = [str(gap.get("sink")) for gap in status.get("gaps", []) if isinstance(gap, dict)]
    parts += [str(part) for part in status.get("failures", {})]
    return ", ".join(dict.fromkeys(parts))


def _age(seconds: float) -> str:
    """Return a time in words.

    >>> _age(75.0)
    '1 min'
    """
    if seconds < 60:
        return f"{max(seconds, 0):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
