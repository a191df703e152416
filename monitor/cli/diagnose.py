"""`trainsentry diagnose`: ranks the suspects of a recorded run."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from trainsentry.anomaly.incident import CRITICAL, Incident, worst_first
from trainsentry.exporters.csv.format import table_paths
from trainsentry.exporters.engine import engine
from trainsentry.exporters.files.json_files import replace_json
from trainsentry.exporters.msprobe.recorded_alerts import alert_files, at_steps, read_alerts
from trainsentry.exporters.run_reader import read_run
from trainsentry.exporters.short_text import counted
from trainsentry.monitor.cli.anomaly_analysis import show_alerts
from trainsentry.monitor.cli.console import (
    ENGINE_HELP,
    FOUND,
    SCHEDULER_HELP,
    ProblemPrinter,
    bad_input,
    check_directory,
    out,
    parse_steps,
    without_output,
)
from trainsentry.monitor.offline.history import diagnose


def diagnose_command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="An output directory, or one rank's directory.")],
    top: Annotated[int, typer.Option("-k", "--top", min=1, help="Suspects shown per incident.")] = 8,
    steps: Annotated[str | None, typer.Option(help="Only these steps, such as 10-20.")] = None,
    anew: Annotated[
        bool, typer.Option("--anew", help="Judge the tables again with the detectors of this version.")
    ] = False,
    engine_name: Annotated[str, typer.Option("--engine", help=ENGINE_HELP)] = "local",
    scheduler: Annotated[str | None, typer.Option(help=SCHEDULER_HELP)] = None,
    out_path: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="OUT", help="Also write what is shown to a file in this folder."),
    ] = None,
) -> None:
    """Rank the suspects of a recorded run: from anomalies.jsonl, or from the CSV tables if there is none.

    A folder of msprobe's monitor (`anomaly_detected`, with rank<r>/anomaly.json) is ranked in msprobe's order. With
    `-o`, the incidents go to incidents.json, msprobe's alerts to anomaly_analyse.json.

    Exit status 1 when there is an incident, 2 when no step was recorded.
    Example: trainsentry diagnose monitor_output -k 3
    """
    wanted = parse_steps(steps)
    alerts = _alert_files(directory)
    if alerts:
        found = at_steps(read_alerts(alerts, ProblemPrinter()), wanted)
        show_alerts(found, top, out_path)
        raise typer.Exit(FOUND if found else 0)
    try:
        with engine(engine_name, scheduler) as mapper:
            incidents = diagnose(recorded_ranks(directory), ProblemPrinter(), wanted, mapper, anew=anew)
    except (ValueError, OSError) as error:
        bad_input(str(error))
    if not incidents:
        if not read_run(directory).has_steps:
            bad_input(f"{directory}: no step was recorded, so there is nothing to diagnose")
        out.print(f"{directory}: nothing abnormal")
        return
    out.print(_count(incidents), style="bold", soft_wrap=True)
    worst = worst_first(incidents)[0]
    for incident in sorted(incidents, key=lambda each: each.id):
        _show(incident, top, is_worst=len(incidents) > 1 and incident is worst)
    if out_path is not None:
        _write(out_path / "incidents.json", incidents, top)
    raise typer.Exit(FOUND)


def recorded_ranks(directory: Path) -> list[Path]:
    """Return the rank directories in `directory`, and `directory` itself if it is one.

    Raises:
        InputError: when there is none, when `directory` is a file, or when it holds several runs.

    """
    check_directory(directory)
    candidates = [*sorted(directory.glob("rank*"), key=lambda p: (len(p.name), p.name)), directory]
    found = [p for p in candidates if _is_rank(p)]
    if not found:
        raise without_output(directory, "rank0/ with tables in it")
    return found


def _alert_files(directory: Path) -> list[Path]:
    """Return msprobe's files in a directory that holds none of ours."""
    ours = directory.is_dir() and any(_is_rank(path) for path in [*directory.glob("rank*"), directory])
    return [] if ours else alert_files(directory)


def _write(path: Path, incidents: Sequence[Incident], top: int) -> None:
    """Write the incidents with their first suspects."""
    shown = [replace(incident, suspects=incident.suspects[:top]).to_json() for incident in incidents]
    try:
        replace_json(path, shown)
    except OSError as error:
        bad_input(f"{path}: cannot be written: {error}")


def _is_rank(path: Path) -> bool:
    """Whether a rank wrote a directory, even without tables or anomalies."""
    ours = any((path / name).is_file() for name in ("anomalies.jsonl", "status.json"))
    return ours or bool(table_paths(path))


def _count(incidents: Sequence[Incident]) -> str:
    """Return what the output begins with."""
    if len(incidents) == 1:
        return "1 incident"
    critical = sum(incident.severity == CRITICAL for incident in incidents)
    return f"{counted(len(incidents), 'incident')}, {critical} critical"


def _show(incident: Incident, top: int, *, is_worst: bool) -> None:
    steps = f"step {incident.first_seen}"
    if incident.last_seen > incident.first_seen:
        steps = f"steps {incident.first_seen} to {incident.last_seen}"
    mark = " (the worst)" if is_worst else ""
    head = f"incident {incident.id}{mark}, {incident.severity}, {steps}: "
    if out.is_terminal:
        out.print()
    out.print_behind("", Text.assemble((head, "bold"), incident.summary))
    for number, s in enumerate(incident.suspects[:top], 1):
        where = f"{s.quantity}, rank {s.rank}"
        what = f" ({where}): {s.kind} since step {s.step}, score {s.score:.4g}"
        out.print_behind(f"{number:3}. ", Text.assemble((s.name, "bold"), what))
        out.print_behind("     ", Text(s.evidence))
    if len(incident.suspects) > top:
        out.print_behind("     ", Text(f"and {counted(len(incident.suspects) - top, 'more suspect')}", style="dim"))
