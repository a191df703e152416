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
from trainsentry.monitor.cli.fitted_table import FittedColumn, fitted


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
    """Return an incident as a box, with its suspects' names as whole as the terminal's width allows."""
    shown = incident.suspects[:4]
    suspects = fitted(
        [
            FittedColumn("#", [str(number) for number in range(1, len(shown) + 1)]),
            FittedColumn("suspect", [s.name for s in shown], right=False, flexible=True, styles=["bold"] * len(shown)),
            FittedColumn("rank", [str(s.rank) for s in shown], 3),
            FittedColumn("quantity", [s.quantity for s in shown], 1, right=False),
            FittedColumn("kind", [s.kind for s in shown], 2, right=False),
            FittedColumn("since step", [str(s.step) for s in shown]),
        ],
        out.width - 4,
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
            out.print_behind(f"  {name:16} ", Text(note))
    if any((directory / "tensorboard").rglob("events.out.tfevents*")):
        command = f"{tensorboard_command()} --logdir {directory / 'tensorboard'}"
        out.print(Text.assemble("Open it: ", (command, "bold")), soft_wrap=True)
    for gap in dict.fromkeys(gap for status in read_run(directory).ranks.values() for gap in _gaps(status)):
        out.print(gap, style="yellow", soft_wrap=True)


def _gaps(status: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the files of a rank lack, so that nobody looks for it there."""
    for gap in status.get("gaps", []):
        yield f"{gap.get('sink')} lacks steps {gap.get('first_step')} to {gap.get('last_step')}: {gap.get('reason')}"
