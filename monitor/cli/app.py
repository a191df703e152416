"""The `trainsentry` command line; each command has its own file."""

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Final

import typer

import trainsentry
from trainsentry.monitor.cli.check import check_command, multi_run_ut_command, run_ut_command
from trainsentry.monitor.cli.compare import compare_command
from trainsentry.monitor.cli.config import config_app
from trainsentry.monitor.cli.csv2tb import csv2tb_command
from trainsentry.monitor.cli.ctl import ctl_command
from trainsentry.monitor.cli.demo.command import demo_command
from trainsentry.monitor.cli.diagnose import diagnose_command
from trainsentry.monitor.cli.doctor import doctor_command
from trainsentry.monitor.cli.graph import graph_command, graph_visualize_command
from trainsentry.monitor.cli.overflow import overflow_command
from trainsentry.monitor.cli.report import report_command
from trainsentry.monitor.cli.run import StartProgram, run_command
from trainsentry.monitor.cli.serve import serve_command
from trainsentry.monitor.cli.watch import watch_command

app = typer.Typer(
    help="Watches a training run from inside, names the first culprit, and keeps the evidence.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo_command)
app.command("run", context_settings={"allow_interspersed_args": False})(run_command)
app.command("diagnose")(diagnose_command)
app.command("rank", hidden=True, help="The same as diagnose.")(diagnose_command)
app.command("csv2tb")(csv2tb_command)
app.command("report")(report_command)
app.command("watch")(watch_command)
app.command("serve")(serve_command)
app.command("ctl")(ctl_command)
app.command("compare")(compare_command)
app.command("overflow")(overflow_command)
app.command("graph")(graph_command)
app.command("check")(check_command)
_MSPROBE: Final[dict[str, Any]] = {"ignore_unknown_options": True, "allow_extra_args": True}
app.command("run_ut", context_settings=_MSPROBE, add_help_option=False)(run_ut_command)
app.command("multi_run_ut", context_settings=_MSPROBE, add_help_option=False)(multi_run_ut_command)
app.command("graph_visualize", context_settings=_MSPROBE, add_help_option=False)(graph_visualize_command)
app.command("doctor")(doctor_command)
app.add_typer(config_app, name="config")


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", is_eager=True, help="Print the version and exit.")] = False,
    local_rank: Annotated[int | None, typer.Option("--local_rank", "--local-rank", hidden=True)] = None,
) -> None:
    """Watch a training run from inside, name the first culprit, and keep the evidence."""
    context.obj = {"local_rank": local_rank}  # DeepSpeed's launcher puts it before the command: `run` passes it on
    if version:
        typer.echo(trainsentry.__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@contextmanager
def _every_character() -> Iterator[None]:
    """Let a terminal of few characters show the others as escapes: a name or a sign must not end a command."""
    streams = [s for s in (sys.stdout, sys.stderr) if isinstance(s, io.TextIOWrapper)]
    before = [s.errors for s in streams]
    for stream in streams:
        if stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        for stream, errors in zip(streams, before, strict=True):
            if not stream.closed:
                stream.reconfigure(errors=errors)


def main() -> None:
    """Run the command line; exit status 0 for done, 1 for a problem found, 2 for bad input.

    `trainsentry run` ends as its script ends.
    """
    try:
        with _every_character():
            status = app()
    except StartProgram as start:
        program = start.program
    else:
        sys.exit(status)
    program.run()
