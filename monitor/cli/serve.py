"""`trainsentry serve`: shows runs in a browser, from their files."""

import asyncio
import contextlib
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from trainsentry.exporters.files.foreign_files import InputError
from trainsentry.exporters.live.answers import Answers
from trainsentry.exporters.live.server import polite, serve
from trainsentry.monitor.cli.console import bad_input, check_directory, err, out

LOOPBACK = "127.0.0.1"


def serve_command(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="The output directory of a run, or a folder of many.")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes a free one.")] = 8600,
    host: Annotated[
        str, typer.Option(help="The address to serve on; any other than this shows the runs to others.")
    ] = LOOPBACK,
) -> None:
    """Show a run in the browser, also while it trains: incidents, curves, layers by steps, ranks, lag and cost.

    The command only reads files, and answers this machine alone unless --host says otherwise. From elsewhere:
    ssh -L 8600:localhost:8600 MACHINE. Example: trainsentry serve monitor_output
    """
    try:
        check_directory(directory)
    except InputError as error:
        bad_input(str(error))
    polite()
    try:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(serve(Answers(directory), host, port, _say))
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        bad_input(f"cannot serve on {host}, port {port}: {reason}; allowed: a free --port, this machine's --host")


def _say(host: str, port: int) -> None:
    shown = f"[{host}]" if ":" in host else host
    out.print(f"http://{shown}:{port}/   Ctrl-C ends it.", soft_wrap=True)
    if host not in {LOOPBACK, "localhost", "::1"}:
        warning = "whoever reaches this address can read the runs: there is no password"
        err.print(Text.assemble(("note:", "yellow"), f" {warning}"), soft_wrap=True)
