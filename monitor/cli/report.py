"""`trainsentry report`: writes the report of a run."""

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from trainsentry.exporters.engine import engine
from trainsentry.exporters.files.foreign_files import InputError
from trainsentry.exporters.report.page import write_report
from trainsentry.exporters.run_reader import read_run
from trainsentry.monitor.cli.console import (
    ENGINE_HELP,
    SCHEDULER_HELP,
    ProblemPrinter,
    bad_input,
    check_directory,
    err,
    out,
    without_output,
)


def report_command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The output directory of a run.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="DIR/report.html by default.")] = None,
    engine_name: Annotated[str, typer.Option("--engine", help=ENGINE_HELP)] = "local",
    scheduler: Annotated[str | None, typer.Option(help=SCHEDULER_HELP)] = None,
) -> None:
    """Write one HTML page with verdict, evidence, layers over steps, curves and cost; it opens without a network.

    Example: trainsentry report monitor_output
    """
    try:
        check_directory(directory)
        if not read_run(directory).ranks:
            raise without_output(directory, "rank0/ with status.json in it")
    except InputError as error:
        bad_input(str(error))
    problems = ProblemPrinter(5)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task("reading")
        try:
            with engine(engine_name, scheduler) as mapper:
                path = write_report(
                    directory, output, problems, lambda what: bar.update(task, description=what), mapper
                )
        except (ValueError, OSError) as error:
            bad_input(str(error))
    if not read_run(directory).has_steps:
        bad_input(f"{directory}: no step was recorded; {path} has the configuration and each rank's status alone")
    out.print(f"{path}: {path.stat().st_size / 2**20:.1f} MB", soft_wrap=True)
