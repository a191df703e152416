"""`trainsentry report`: writes the report of a run, as a page or as a digest of a few kilobytes."""

import enum
import os
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


class ReportFormat(str, enum.Enum):
    """The form of a report."""

    HTML = "html"
    MARKDOWN = "markdown"
    JSON = "json"


def report_command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The output directory of a run.")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="DIR/report.html by default; standard output for markdown and json."),
    ] = None,
    form: Annotated[
        ReportFormat,
        typer.Option("--format", help="html: a page; markdown or json: verdict, evidence and pointers, at most 8 KB."),
    ] = ReportFormat.HTML,
    engine_name: Annotated[str, typer.Option("--engine", help=ENGINE_HELP)] = "local",
    scheduler: Annotated[str | None, typer.Option(help=SCHEDULER_HELP)] = None,
) -> None:
    """Write one HTML page with verdict, evidence, layers over steps, curves and cost; it opens without a network.

    With --format markdown or json it writes a digest for a ticket, a script or a language model.
    Example: trainsentry report monitor_output, or with --format json
    """
    try:
        check_directory(directory)
        if not read_run(directory).ranks:
            raise without_output(directory, "rank0/ with status.json in it")
    except InputError as error:
        bad_input(str(error))
    if form is not ReportFormat.HTML:
        _write_digest(directory, output, form)
        return
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


def _write_digest(directory: Path, output: Path | None, form: ReportFormat) -> None:
    """Write the digest to a file or to standard output."""
    from trainsentry.exporters.report.digest_data import digest_of
    from trainsentry.exporters.report.digest_text import markdown

    try:
        digest = digest_of(directory, ProblemPrinter(5))
        text = markdown(digest) if form is ReportFormat.MARKDOWN else digest.model_dump_json(indent=1) + "\n"
        if output is None:
            typer.echo(text, nl=False)
        else:
            temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(output)
    except (ValueError, OSError) as error:
        bad_input(str(error))
    if digest.verdict.status == "no_steps":
        bad_input(f"{directory}: no step was recorded")
