"""The view of a run in the terminal: state, curves, incidents, ranks and the worst series."""

import math
from collections.abc import Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trainsentry.exporters.incident_groups import IncidentGroup, grouped
from trainsentry.exporters.run_reader import RecordedRun, last_anomalies, last_scalars
from trainsentry.exporters.run_state import is_silent, lag_of, state_of_rank, state_of_run, troubles_of
from trainsentry.exporters.short_text import counted, number
from trainsentry.monitor.cli.console import out
from trainsentry.monitor.cli.fitted_table import FittedColumn, fitted
from trainsentry.monitor.cli.watch_keys import ChosenIncident

BARS: Final = "▁▂▃▄▅▆▇█"

MAX_RANKS: Final = 16
MAX_GROUPS: Final = 8
WORST: Final = 8

_SEVERITY: Final = {"critical": "bold red", "warning": "bold yellow"}
_STATE: Final = {"running": "bold green", "finished": "bold", "stopped": "bold yellow", "crashed": "bold red"}


def view(
    run: RecordedRun, now: float, choice: ChosenIncident | None = None, height: int | None = None
) -> RenderableType:
    """Return the view of a run; `now` is in seconds since the epoch.

    With a `choice` the keys are shown, and one incident is marked or open. What does not fit in `height` lines is left
    out, the worst series first.
    """
    groups = grouped(run.incidents)
    position = min(choice.position, max(len(groups) - 1, 0)) if choice is not None else 0
    if choice is not None and choice.is_open and groups:
        return Group(_head(run, now), Text(), _opened(run, groups[position]), Text(), _keys(is_open=True))
    first = next(iter(run.ranks), 0)
    scalars = last_scalars(run.root / f"rank{first}")
    parts: list[RenderableType] = [
        _head(run, now),
        Text(),
        *_curves(scalars),
        *_incidents(run, groups, position, choice),
    ]
    ends = [_keys(is_open=False)] if choice is not None else []
    for part in (_ranks(run, now), _worst(run)):
        if part is not None and (height is None or _lines([*parts, Text(), part, *ends]) <= height):
            parts += [Text(), part]
    if choice is None and groups:
        ends = [Text(f"The evidence: trainsentry diagnose {run.root}", style="dim")]
    return Group(*parts, *([Text()] if ends else []), *ends)


def _lines(parts: Sequence[RenderableType]) -> int:
    return len(out.render_lines(Group(*parts)))


def _head(run: RecordedRun, now: float) -> Text:
    """Return the run, how it stands, and in plain words what a person should know of it first."""
    state = state_of_run(run)
    text = Text.assemble(("trainsentry ", "bold"), str(run.root), "\n")
    steps = [status.get("step", -1) for status in run.ranks.values()]
    newest = max(steps, default=-1)
    facts = [f"step {newest}" if newest >= 0 else "no step", counted(len(run.ranks), "rank")]
    seconds = [s["cost"]["step_seconds"] for s in run.ranks.values() if "step_seconds" in s.get("cost", {})]
    facts += [f"{_seconds(max(seconds))} a step"] if seconds else []
    if state in {"running", "unknown"}:
        text.append(state, style=_STATE.get(state, "bold")).append(", ")
    text.append(", ".join(facts))
    for note, style in _notes(run, now):
        text.append("\n").append(note, style=style)
    return text


def _notes(run: RecordedRun, now: float) -> list[tuple[str, str]]:
    """Return sentences on the end, the lag and the silence of a run."""
    state, notes = state_of_run(run), []
    why = next((status["why"] for status in run.ranks.values() if status.get("why")), None)
    ended = {
        "finished": "The run has finished",
        "stopped": "The run was stopped",
        "crashed": "The run crashed or was killed",
    }.get(state)
    if ended is not None:
        incident = next((i["id"] for i in run.incidents if why and i.get("summary") == why and "id" in i), None)
        because = f" by incident {incident}" if incident is not None else f": {why.rstrip('.')}" if why else ""
        notes.append((f"{ended}{because}.", _STATE[state]))
    steps, seconds = lag_of(run)
    if state == "running" and steps > 1:
        late = f"The recorder is {counted(steps, 'step')} ({_age(seconds)}) behind the training: incidents come late."
        notes.append((late, "yellow"))
    silent = [(now - status["updated"], rank) for rank, status in run.ranks.items() if is_silent(status, now)]
    if silent:
        age, rank = max(silent)
        more = f", and {counted(len(silent) - 1, 'more rank')} too" if len(silent) > 1 else ""
        notes.append((f"Rank {rank} has said nothing for {_age(age)}{more}.", "bold red"))
    return notes


def _curves(scalars: dict[str, list[tuple[int, float]]]) -> list[RenderableType]:
    """Return the newest values of logged scalars as bars over the whole width."""
    shown = {name: [value for _, value in scalars[name]] for name in _SCALARS if scalars.get(name)}
    if not shown:
        return []
    numbers = {name: f"{values[-1]:.5g}" for name, values in shown.items()}
    used = max(map(len, shown)) + max(map(len, numbers.values())) + 4
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(3):
        table.add_column(no_wrap=True)
    for name, values in shown.items():
        table.add_row(Text(name, style="bold"), curve(values, max(out.width - used - 2, 8)), Text(numbers[name]))
    return [table, Text()]


_SCALARS: Final = ("loss", "learning_rate", "grad_norm", "loss_scale")


def curve(values: Sequence[float], width: int) -> Text:
    """Return values as a line of `width` bars; a bar shows the maximum of its share, a red × a non-finite value.

    >>> curve([1.0, 2.0, 3.0], 6).plain
    '▁▁▄▄██'
    """
    good = [value for value in values if math.isfinite(value)]
    low, high = min(good, default=0.0), max(good, default=0.0)
    text = Text()
    for i in range(width if values else 0):
        begin, end = (i * len(values) // width, (i + 1) * len(values) // width)
        share = values[begin : max(end, begin + 1)]
        finite = [value for value in share if math.isfinite(value)]
        if len(finite) < len(share):
            text.append("×", style="bold red")
            continue
        part = (max(finite) - low) / (high - low) if high > low else 0.0
        text.append(BARS[int(part * (len(BARS) - 1))])
    return text


def _incidents(
    run: RecordedRun, groups: Sequence[IncidentGroup], position: int, choice: ChosenIncident | None
) -> list[RenderableType]:
    if not groups:
        if run.has_steps:
            return [Text("No incident.", style="green")]
        over = state_of_run(run) != "running"
        return [Text("No step was recorded." if over else "No step was recorded yet.", style="yellow")]
    count = counted(len(run.incidents), "incident")
    head = count if len(groups) == len(run.incidents) else f"{count} of {counted(len(groups), 'first suspect')}"
    parts: list[RenderableType] = [Text(head, style="bold")]
    since = max(0, min(position - MAX_GROUPS // 2, len(groups) - MAX_GROUPS))
    for i, group in list(enumerate(groups))[since : since + MAX_GROUPS]:
        parts.append(_line(group, "> " if choice is not None and i == position else "  "))
        if i == position:
            parts.append(Padding(Text(str(group.worst.get("summary", ""))), (0, 0, 0, 4)))
    more = len(groups) - MAX_GROUPS
    return [*parts, *([Text(f"  and {counted(more, 'more suspect')}", style="dim")] if more > 0 else [])]


def _line(group: IncidentGroup, mark: str) -> RenderableType:
    """Return a group behind its mark: severity, steps, suspect, and how often it came."""
    worst = group.worst
    severity = str(worst.get("severity"))
    text = Text.assemble((severity, _SEVERITY.get(severity, "bold")), f", {_steps(group)}: ")
    text.append(str(worst.get("name")), style="bold")
    text.append(f" ({worst.get('quantity')}, rank {worst.get('rank')}), {worst.get('kind')}")
    if group.others:
        text.append(f", {len(group.all)} times", style="dim")
    line = Table.grid()
    line.add_column(width=len(mark), no_wrap=True)
    line.add_column()
    line.add_row(Text(mark, style="bold"), text)
    return line if mark else text


def _steps(group: IncidentGroup) -> str:
    first, last = group.first_seen, group.last_seen
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _opened(run: RecordedRun, group: IncidentGroup) -> RenderableType:
    """Return an incident with everything that is known of it."""
    worst = group.worst
    numbered = Text(f"incident {worst.get('id')}", style="bold")
    parts: list[RenderableType] = [numbered, _line(group, ""), Text(), Text(str(worst.get("summary", ""))), Text()]
    for position, suspect in enumerate(worst.get("suspects", [])[:WORST], 1):
        where = f" ({suspect.get('quantity')}, rank {suspect.get('rank')}): {suspect.get('kind')}"
        since = f" since step {suspect['step']}" if "step" in suspect else ""
        parts.append(Text.assemble(f"{position}. ", (str(suspect.get("name")), "bold"), where, since))
        if suspect.get("evidence"):
            parts.append(Padding(Text(str(suspect["evidence"]), style="dim"), (0, 0, 0, 3)))
    if group.others:
        times = "; ".join(f"step {i.get('first_seen')} ({i.get('kind')})" for i in group.all)
        parts += [Text(), Text(f"The same first suspect {len(group.all)} times: {times}.")]
    parts += [Text(f"· {action}", style="dim") for action in worst.get("actions", [])]
    parts += [Text(), Text(f"trainsentry diagnose {run.root}", style="bold")]
    return Group(*parts)


def _keys(*, is_open: bool) -> Text:
    told = "enter or q: back   up, down: another incident" if is_open else "up, down: choose   enter: open   q: quit"
    return Text(told, style="dim")


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
    seen = [anomaly for _, anomaly in worst]
    columns = (
        FittedColumn("series", [str(name) for (_, name, _), _ in worst], right=False, flexible=True),
        FittedColumn("quantity", [str(quantity) for (_, _, quantity), _ in worst], 1, right=False),
        FittedColumn("rank", [str(rank) for (rank, _, _), _ in worst], 4),
        FittedColumn("step", [str(anomaly["step"]) for anomaly in seen]),
        FittedColumn("kind", [str(anomaly.get("kind", "")) for anomaly in seen], 3, right=False),
        FittedColumn("value", [number(anomaly.get("value")) for anomaly in seen]),
        FittedColumn("usual", [number(anomaly.get("expected")) for anomaly in seen], 2),
        FittedColumn("score", [number(anomaly.get("score")) for anomaly in seen], 5),
    )
    return fitted(columns, out.width, "worst series recently")


def _ranks(run: RecordedRun, now: float) -> RenderableType:
    by_trouble = sorted(run.ranks.items(), key=lambda item: (not troubles_of(item[1]), item[0]))
    shown = by_trouble[:MAX_RANKS]
    statuses = [status for _, status in shown]
    red = ["red" if is_silent(status, now) else "" for status in statuses]
    table = fitted(
        (
            FittedColumn("rank", [str(rank) for rank, _ in shown]),
            FittedColumn("state", [state_of_rank(status) for status in statuses], right=False, styles=red),
            FittedColumn("step", [str(status.get("step", "")) for status in statuses]),
            FittedColumn("seen", [_age(now - s["updated"]) if "updated" in s else "" for s in statuses], 2, styles=red),
            FittedColumn("behind", [_behind(status) for status in statuses], 5),
            FittedColumn("anomalies", [str(status.get("anomalies", "")) for status in statuses], 4),
            FittedColumn("overflows", [str(status.get("overflow_steps", "")) for status in statuses], 6),
            FittedColumn("skipped", [str(status.get("skipped_steps", "")) for status in statuses], 7),
            FittedColumn("cost now", [_share(status, "recent_share") for status in statuses], 3),
            FittedColumn("in all", [_share(status, "share") for status in statuses], 8),
            FittedColumn("trouble", [", ".join(troubles_of(s)) for s in statuses], right=False, flexible=True),
        ),
        out.width,
    )
    if len(run.ranks) > MAX_RANKS:
        return Group(table, Text(f"and {counted(len(run.ranks) - MAX_RANKS, 'more rank')}", style="dim"))
    return table


def _behind(status: dict[str, Any]) -> str:
    return counted(status["lag_steps"], "step") if status.get("lag_steps") else ""


def _share(status: dict[str, Any], key: str) -> str:
    share = status.get("cost", {}).get(key)
    return "" if share is None else f"{100 * share:.1f} %"


def _seconds(seconds: float) -> str:
    """Format the seconds of a step.

    >>> _seconds(0.0123), _seconds(2.5)
    ('12.3 ms', '2.5 s')
    """
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _age(seconds: float) -> str:
    """Format an age in seconds, minutes or hours.

    >>> _age(75.0)
    '1 min'
    """
    if seconds < 60:
        return f"{max(seconds, 0):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
