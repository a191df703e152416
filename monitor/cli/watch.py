"""`trainsentry watch`."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live

from trainsentry.exporters.run_reader import read_run
from trainsentry.monitor.cli.console import FOUND, bad_input, out
from trainsentry.monitor.cli.watch_view import view


def watch_command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The output directory of a run.")],
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks at the files.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Show it once, and end.")] = False,
) -> None:
    """Show a run in the terminal: steps, loss, incidents, worst series, each rank's health.

    Only files are read, so it works from another machine on a shared file system, and of a run that is over. It ends
    with the run, with status 1 when there was an incident. Example: trainsentry watch monitor_output
    """
    if not directory.is_dir():
        bad_input(f"{directory}: no such directory")
    run = read_run(directory)
    if not run.ranks:
        bad_input(f"{directory}: holds no output of trainsentry (expected rank0/ with status.json in it)")
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
