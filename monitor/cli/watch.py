"""`trainsentry watch`: shows a run in the terminal."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live

from trainsentry.exporters.files.foreign_files import InputError
from trainsentry.exporters.incident_groups import grouped
from trainsentry.exporters.run_reader import RecordedRun, read_run
from trainsentry.monitor.cli.console import FOUND, bad_input, check_directory, out, without_output
from trainsentry.monitor.cli.watch_keys import ChosenIncident, Keyboard
from trainsentry.monitor.cli.watch_view import view


def watch_command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The output directory of a run.")],
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two reads of the files.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Show the run once, and exit.")] = False,
) -> None:
    """Show a run in the terminal: steps, loss, incidents, worst series, each rank's health.

    Keys: up and down choose an incident, enter opens it, q quits. The command only reads files, so it works from
    another machine on a shared file system, and for a finished run. It ends with the run, with exit status 1 if there
    is an incident. Example: trainsentry watch monitor_output
    """
    try:
        check_directory(directory)
        run = read_run(directory)
        if not run.ranks:
            raise without_output(directory, "rank0/ with status.json in it")
    except InputError as error:
        bad_input(str(error))
    if not once and not run.is_over and out.is_terminal:
        run = _follow(run, every)
    out.print(view(run, time.time()))
    if run.incidents:
        raise typer.Exit(FOUND)


def _follow(run: RecordedRun, every: float) -> RecordedRun:
    """Show the run until it is over or `q` is pressed; return its last state."""
    keyboard = Keyboard()
    choice = ChosenIncident()
    with keyboard.listening(), Live(console=out, screen=True, auto_refresh=False) as live:
        read_at = time.monotonic()
        try:
            while not run.is_over and not choice.is_over:
                shown = choice if keyboard.is_there else None
                live.update(view(run, time.time(), shown, out.height), refresh=True)
                for key in keyboard.wait(max(read_at + every - time.monotonic(), 0.0)):
                    choice = choice.after(key, len(grouped(run.incidents)))
                if time.monotonic() - read_at >= every:
                    run, read_at = read_run(run.root), time.monotonic()
        except KeyboardInterrupt:
            pass
    return run
