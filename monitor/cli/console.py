"""Consoles, exit statuses, options and progress bars shared by the commands."""

import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NoReturn

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from trainsentry.exporters.files.foreign_files import InputError
from trainsentry.exporters.short_text import plain, shorten


class PlainConsole(Console):
    """A console that prints names literally: without markup, and with control characters escaped."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of a text, a table or a panel."""
        if isinstance(renderable, str):
            renderable = self.render_str(renderable)
        if isinstance(renderable, Text):
            renderable = self._escaped(renderable)
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(plain(segment.text), segment.style)

    def _escaped(self, text: Text) -> Text:
        """Escape a text before it is broken into lines, as escapes are longer than the characters."""
        if plain(text.plain) == text.plain:
            return text
        whole = text.blank_copy()
        for segment in text.render(self):
            whole.append(plain(segment.text), segment.style)
        return whole

    def print_behind(self, mark: str, text: Text) -> None:
        """Print a text behind a mark: on a terminal wrapped with an indent, in a pipe as one line."""
        if not self.is_terminal:
            self.print(Text.assemble(mark, text), soft_wrap=True)
            return
        line = Table.grid()
        line.add_column(width=len(mark), no_wrap=True)
        line.add_column()
        line.add_row(mark, text)
        self.print(line)


out = PlainConsole()
err = PlainConsole(stderr=True)


class ProblemPrinter:
    """Prints problems of input files, one per line, and counts them; prints at most `shown` lines per file."""

    def __init__(self, shown: int = 20) -> None:
        self.of_file: Counter[Path] = Counter()
        self._shown = shown

    def __call__(self, path: Path, line: int, message: str) -> None:
        """Print a problem; see `exporters.files.foreign_files.Report`."""
        self.of_file[path] += 1
        if self.of_file[path] <= self._shown:
            where = f"{path}:{line}:" if line else f"{path}:"
            err.print(Text.assemble((where, "yellow"), f" {shorten(message, MAX_MESSAGE)}; left out"), soft_wrap=True)


MAX_MESSAGE: Final = 1000
"""Characters of a printed message at most."""

SHOWN_RUNS: Final = 20
"""Runs in a folder that an error names."""

FOUND = 1
"""Exit status: the command found the problem that it looks for."""

BAD_INPUT = 2
"""Exit status: the input or an option is invalid."""

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it: 128 and the number of the signal."""


ENGINE_HELP = "local, or dask to read ranks and tables on a cluster."
SCHEDULER_HELP = "Address of a dask scheduler; without it, dask starts two local processes."


def check_directory(path: Path) -> None:
    """Check that a command's argument is a directory.

    Raises:
        InputError: when it is a file, or does not exist.

    """
    if path.is_file():
        raise InputError(f"{path}: is a file; allowed: the output directory of a run, such as {path.parent}")
    if not path.is_dir():
        raise InputError(f"{path}: no such directory")


def runs_in(directory: Path) -> list[Path]:
    """Return the output directories directly inside a directory."""
    found = [path.parent for name in ("*/run.json", "*/rank*/status.json") for path in directory.glob(name)]
    return sorted({path.parent if path.name.startswith("rank") else path for path in found})


def without_output(directory: Path, expected: str) -> InputError:
    """Return the error for a directory that is no output of ours; it names the runs that lie inside it."""
    inside = runs_in(directory)
    if not inside:
        return InputError(f"{directory}: holds no output of trainsentry (expected {expected})")
    shown = "".join(f"\n  {path}" for path in inside[:SHOWN_RUNS])
    more = f"\n  and {len(inside) - SHOWN_RUNS} more" if len(inside) > SHOWN_RUNS else ""
    return InputError(f"{directory}: holds several runs; give one of them:{shown}{more}")


def bad_input(message: str) -> NoReturn:
    """End the command with a message on standard error and exit status 2."""
    err.print(Text.assemble(("error:", "red"), f" {message}"), soft_wrap=True)
    raise typer.Exit(BAD_INPUT)


def progress_bar() -> Progress:
    """Return a bar of bytes on standard error, with the current table and the remaining time."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=err, transient=True)


def tensorboard_command() -> str:
    """Return the command that starts TensorBoard: its path if the virtual environment is not active."""
    if shutil.which("tensorboard"):
        return "tensorboard"
    path = Path(sys.executable).parent / "tensorboard"
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


_STEPS: Final = re.compile(r"\d{1,16}(-\d{1,16})?", re.ASCII)


def parse_steps(text: str | None) -> range | None:
    """Return the steps of "10-20" (inclusive) or "15".

    Raises:
        typer.Exit: with status 2 for any other text.

    """
    if text is None:
        return None
    first, _, last = text.partition("-")
    if not _STEPS.fullmatch(text):
        bad_input(f"--steps: {text!r}; allowed: a step or a range such as 10-20")
    if last and int(last) < int(first):
        bad_input(f"--steps: {text!r} ends before it begins; allowed: a step or a range such as 10-20")
    return range(int(first), int(last or first) + 1)
