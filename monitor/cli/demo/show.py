"""Prints the progress, the incidents and the files of the demo."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from trainsentry.anomaly.incident import Incident
from trainsentry.exporters.run_reader import read_run
from trainsentry.exporters.short_text import counted
from trainsentry.monitor.cli.console import out, tensorboard_command


def progress_bar() -> Progress:
    """Return the progress bar of training."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}", markup=False),
        TimeElapsedColumn(),
        console=out,
    )


def panel(incident: Incident) -> Panel:
    """Return an incident as a box."""
    suspects = Table(box=None, padding=(0, 1))
    for column in ("#", "suspect", "rank", "quantity", "kind", "since step"):
        suspects.add_column(column, style="bold" if column == "suspect" else "")
    for number, suspect in enumerate(incident.suspects[:4], 1):
        suspects.add_row(
            str(number), suspect.name, str(suspect.rank), suspect.quantity, suspect.kind, str(suspect.step)
        )
    body = Table.grid(padding=(0, 0, 1, 0))
    body.add_row(incident.summary)
    body.add_row(suspects)
    body.add_row("\n".join(f"· {action}" for action in incident.actions))
    return Panel(body, title=Text(f"incident {incident.id}: {incident.severity}"), border_style="red")


def show_files(directory: Path) -> None:
    """Print the written files, and the command that opens them."""
    files = [p for p in directory.rglob("*") if p.is_file()]
    size = sum(p.stat().st_size for p in files) / 2**20
    out.print(
        Text.assemble("\nWritten to ", (str(directory), "bold"), f": {counted(len(files), 'file')}, {size:.1f} MB")
    )
    notes = {
        "incidents.jsonl": "the incident, with suspects and evidence",
        "report.html": "the incident on a page, with layers, curves and cost",
        "rank0": "statistics of every step as CSV, anomalies, status",
        "global": "statistics of whole tensors, combined from all ranks",
        "dump": "the suspects' tensors",
        "tensorboard": "the same statistics as curves",
    }
    for name, note in notes.items():
        if (directory / name).exists():
            out.print(f"  {name:16} {note}")
    if any((directory / "tensorboard").rglob("events.out.tfevents*")):
        command = f"{tensorboard_command()} --logdir {directory / 'tensorboard'}"
        out.print(Text.assemble("Open it: ", (command, "bold")), soft_wrap=True)
    for gap in dict.fromkeys(gap for status in read_run(directory).ranks.values() for gap in _gaps(status)):
        out.print(gap, style="yellow", soft_wrap=True)


def _gaps(status: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the files of a rank lack, so that nobody looks for it there."""
    for gap in status.get("gaps", []):
        yield f"{gap.get('sink')} lacks steps {gap.get('first_step')} to {gap.get('last_step')}: {gap.get('reason')}"
