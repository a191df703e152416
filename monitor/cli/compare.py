"""`trainsentry compare`: shows where two dumps or runs first differ."""

import csv
import math
import os
from pathlib import Path
from typing import Annotated

import typer

from trainsentry.exporters.engine import engine
from trainsentry.exporters.files.foreign_files import InputError, read_object
from trainsentry.exporters.short_text import counted
from trainsentry.monitor.cli.console import ENGINE_HELP, FOUND, SCHEDULER_HELP, ProblemPrinter, bad_input, err, out
from trainsentry.monitor.offline.compare_runs import Compared, compare

SHOWN = 20
"""Rows shown; the table on disk has all."""


def compare_command(
    a: Annotated[Path, typer.Argument(metavar="A", help="A dump, a monitored run, or gradients from grad_probe.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one of the same kind.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The table of all rows, as CSV.")] = Path(
        "comparison.csv"
    ),
    names: Annotated[
        Path | None, typer.Option("--names", help='JSON that maps name prefixes of A to those of B: {"a": "b"}.')
    ] = None,
    engine_name: Annotated[str, typer.Option("--engine", help=ENGINE_HELP)] = "local",
    scheduler: Annotated[str | None, typer.Option(help=SCHEDULER_HELP)] = None,
) -> None:
    """Compare two dumps, or two monitored runs: where they first differ, by how much, and what only one of them has.

    Exit status 1 when they differ. Example: trainsentry compare dump_cpu dump_npu --names names.json
    """
    try:
        with engine(engine_name, scheduler) as mapper:
            compared = compare(a, b, _read_names(names), mapper, ProblemPrinter())
    except (ValueError, OSError) as error:
        bad_input(str(error))
    try:
        _write(output, compared)
    except OSError as error:
        bad_input(f"--output: {output}: {error.strerror}")
    _show(compared)
    err.print(f"{counted(len(compared.rows), 'row')} in {output}", soft_wrap=True)
    if compared.first is not None or compared.only_in_one:
        raise typer.Exit(FOUND)


def _read_names(path: Path | None) -> dict[str, str]:
    if path is None:
        return {}
    try:
        found = read_object(path)
    except (OSError, InputError) as error:
        bad_input(f"--names: {error}")
    if not all(isinstance(v, str) for v in found.values()):
        bad_input(f"--names: {path}: holds a value that is not a text; allowed: an object that maps texts to texts")
    return found


def _write(path: Path, compared: Compared) -> None:
    """Write the table as a new file; if the name is a link, its target stays unchanged."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("x", newline="", encoding="utf-8", errors="backslashreplace") as file:
            writer = csv.writer(file)
            writer.writerow(compared.columns)
            writer.writerows(compared.rows)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _show(compared: Compared) -> None:
    out.print(compared.summary, style="bold", soft_wrap=True)
    for row in compared.worst[:SHOWN]:
        cells = zip(compared.columns, row, strict=True)
        shown = [f"{name} {_text(value)}" for name, value in cells if name not in _HIDDEN and not _is_empty(value)]
        out.print("  " + ", ".join(shown), soft_wrap=True)
    if len(compared.worst) > SHOWN:
        out.print(f"  … and {len(compared.worst) - SHOWN} more")


_HIDDEN = frozenset({"status", "dtype", "shape"})


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _is_empty(value: object) -> bool:
    return value == "" or (isinstance(value, float) and math.isnan(value))
