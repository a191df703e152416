"""What the commands share: consoles, and how they end on bad input."""

import shutil
import sys
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

FOUND = 1
"""Exit status: the problem that was looked for is there."""

BAD_INPUT = 2
"""Exit status: the command cannot work with what it was given."""


ENGINE_HELP = "local, or dask: ranks and tables are read on a cluster."
SCHEDULER_HELP = "Address of a dask scheduler; else two processes are started here."


def bad_input(message: str) -> NoReturn:
    """End the command with a message on standard error and exit status 2."""
    err.print(f"[red]error:[/red] {message}", markup=True, soft_wrap=True)
    raise typer.Exit(BAD_INPUT)


def progress_bar() -> Progress:
    """Return a bar of bytes on standard error, with what is being worked on and how long it will take."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=err, transient=True)


def tensorboard_command() -> str:
    """Return how TensorBoard is called here: by its path where the virtual environment is not active."""
    if shutil.which("tensorboard"):
        return "tensorboard"
    beside = Path(sys.executable).parent / "tensorboard"
    try:
        return str(beside.relative_to(Path.cwd()))
    except ValueError:
        return str(beside)


def parse_steps(text: str | None) -> range | None:
    """Return the steps of "10-20" (both included) or "15".

    Raises:
        typer.Exit: with status 2 when the text is no such range.

    """
    if text is None:
        return None
    first, _, last = text.partition("-")
    if not first.isdigit() or (last and not last.isdigit()) or text.endswith("-"):
        bad_input(f"--steps: {text!r}; allowed: a step or a range such as 10-20")
    if last and int(last) < int(first):
        bad_input(f"--steps: {text!r} ends before it begins; allowed: a step or a range such as 10-20")
    return range(int(first), int(last or first) + 1)
