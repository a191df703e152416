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
    html: Annotated[
        Path | None, typer.Option("--html", help="A page of two monitored runs laid over each other.")
    ] = None,
    engine_name: Annotated[str, typer.Option("--engine", help=ENGINE_HELP)] = "local",
    scheduler: Annotated[str | None, typer.Option(help=SCHEDULER_HELP)] = None,
) -> None:
    """Compare two dumps, or two monitored runs: where they first differ, by how much, and what only one of them has.

    Exit status 0 when they do not differ, 1 when they do, also in extent alone, 2 when they have nothing in common.
    Example: trainsentry compare run_a run_b --html out.html
    """
    prefixes = _read_names(names)
    problems = ProblemPrinter()
    try:
        with engine(engine_name, scheduler) as mapper:
            compared = compare(a, b, prefixes, mapper, problems)
    except (ValueError, OSError) as error:
        bad_input(str(error))
    try:
        _write(output, compared)
    except OSError as error:
        bad_input(f"--output: {output}: {error.strerror}")
    _show(compared)
    err.print(f"{counted(len(compared.rows), 'row')} in {output}", soft_wrap=True)
    if html is not None:
        _write_page(html, a, b, compared, prefixes)
    if compared.differ:
        raise typer.Exit(FOUND)


def _write_page(path: Path, a: Path, b: Path, compared: Compared, names: dict[str, str]) -> None:
    if compared.runs is None:
        bad_input(f"--html: {a} and {b} are no monitored runs; allowed: two of those")
    from trainsentry.monitor.offline.comparison_page import write_comparison

    try:
        write_comparison(path, a, b, compared.runs, names)
    except OSError as error:
        bad_input(f"--html: {path}: {error.strerror}")
    out.print(f"{path}: {path.stat().st_size / 2**20:.1f} MB", soft_wrap=True)


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
    shown = [i for i, name in enumerate(compared.columns) if name not in _HIDDEN]
    rows = [["" if _is_empty(row[i]) else _text(row[i]) for i in shown] for row in compared.worst[:SHOWN]]
    table = [[compared.columns[i] for i in shown], *rows] if rows else []
    kept = [i for i in range(len(shown)) if any(row[i] for row in table[1:])]
    wide = [max(len(row[i]) for row in table) for i in kept]
    for row in table:
        out.print("  " + "  ".join(f"{row[i]:<{w}}" for i, w in zip(kept, wide, strict=True)).rstrip(), soft_wrap=True)
    if len(compared.worst) > SHOWN:
        out.print(f"  … and {len(compared.worst) - SHOWN} more")


_HIDDEN = frozenset({"status", "dtype", "shape"})


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _is_empty(value: object) -> bool:
    return value == "" or (isinstance(value, float) and math.isnan(value))
