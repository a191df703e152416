"""What the commands share: consoles, and how they end on bad input."""

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
from rich.text import Text

from trainsentry.exporters.short_text import plain, shorten


class PlainConsole(Console):
    """A console that shows names as they are: no text is markup, and control characters stand as their escapes."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield what is shown of a text, a table or a panel."""
        if isinstance(renderable, str):
            renderable = self.render_str(renderable)
        if isinstance(renderable, Text):
            renderable = self._written_out(renderable)
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(plain(segment.text), segment.style)

    def _written_out(self, text: Text) -> Text:
        """Return a text with its escapes, before it is broken into lines: they are longer than what they stand for."""
        if plain(text.plain) == text.plain:
            return text
        whole = text.blank_copy()
        for segment in text.render(self):
            whole.append(plain(segment.text), segment.style)
        return whole


out = PlainConsole()
err = PlainConsole(stderr=True)


class ProblemPrinter:
    """Shows what could not be read, a line each, and counts it; of one file at most `shown` lines."""

    def __init__(self, shown: int = 20) -> None:
        self.of_file: Counter[Path] = Counter()
        self._shown = shown

    def __call__(self, path: Path, line: int, message: str) -> None:
        """Show a problem; see `exporters.json_files.Report`."""
        self.of_file[path] += 1
        if self.of_file[path] <= self._shown:
            place = f"{path}:{line}:" if line else f"{path}:"
            err.print(Text.assemble((place, "yellow"), f" {shorten(message, MAX_MESSAGE)}; left out"), soft_wrap=True)


MAX_MESSAGE: Final = 1000
"""Characters of the longest message that is shown."""

FOUND = 1
"""Exit status: the problem that was looked for is there."""

BAD_INPUT = 2
"""Exit status: the command cannot work with what it was given."""


ENGINE_HELP = "local, or dask: ranks and tables are read on a cluster."
SCHEDULER_HELP = "Address of a dask scheduler; else two processes are started here."


def bad_input(message: str) -> NoReturn:
    """End the command with a message on standard error and exit status 2."""
    err.print(Text.assemble(("error:", "red"), f" {message}"), soft_wrap=True)
    raise typer.Exit(BAD_INPUT)


def progress_bar() -> Progress:
    """Return a bar of bytes on standard error, with what is being worked on and how long it will take."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeElapsedColumn())
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


_STEPS: Final = re.compile(r"\d{1,16}(-\d{1,16})?", re.ASCII)


def parse_steps(text: str | None) -> range | None:
    """Return the steps of "10-20" (both included) or "15".

    Raises:
        typer.Exit: with status 2 when the text is no such range.

    """
    if text is None:
        return None
    first, _, last = text.partition("-")
    if not _STEPS.fullmatch(text):
        bad_input(f"--steps: {text!r}; allowed: a step or a range such as 10-20")
    if last and int(last) < int(first):
        bad_input(f"--steps: {text!r} ends before it begins; allowed: a step or a range such as 10-20")
    return range(int(first), int(last or first) + 1)
