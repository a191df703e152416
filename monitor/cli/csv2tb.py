"""`trainsentry csv2tb`."""

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from trainsentry.exporters.csv2tb import csv2tb
from trainsentry.exporters.csv_reader import NotOurs
from trainsentry.monitor.cli.console import bad_input, err, out, parse_steps, tensorboard_command

SHOWN = 20
"""Malformed lines shown of each file; the rest are counted."""


def csv2tb_command(
    source: Annotated[Path, typer.Argument(help="An output directory, or one rank's.")],
    target: Annotated[Path | None, typer.Argument(metavar="[OUT]", help="SOURCE/tensorboard_csv by default.")] = None,
    quantity: Annotated[list[str] | None, typer.Option(help="Only these, such as gradient,update.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Tables converted at a time.")] = 1,
    steps: Annotated[str | None, typer.Option(help="Convert only these steps, such as 10-20.")] = None,
) -> None:
    """Convert the CSV tables of a run to TensorBoard event files.

    Example: trainsentry csv2tb monitor_output --quantity gradient --steps 100-200
    """
    out_dir = target or source / "tensorboard_csv"
    problems: Counter[Path] = Counter()

    def report(path: Path, line: int, message: str) -> None:
        problems[path] += 1
        if problems[path] <= SHOWN:
            err.print(f"[yellow]{path}:{line}:[/yellow] {message}; left out", soft_wrap=True)

    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=err) as bar:
        task = bar.add_task("converting")
        try:
            done = csv2tb(
                source,
                out_dir,
                report,
                quantities=[name for given in quantity or () for name in given.split(",")],
                jobs=jobs,
                steps=parse_steps(steps),
                progress=lambda table: bar.update(task, description=table),
            )
        except (NotOurs, OSError) as error:
            bad_input(str(error))
    if not done.scalars:
        bad_input(f"{source}: nothing to convert" + (f" in steps {steps}" if steps else ""))
    out.print(
        f"{done.scalars} scalars of {done.tables} tables and {done.runs} runs written to {out_dir}"
        + (f"; {sum(problems.values())} malformed lines left out" if problems else "")
    )
    out.print(f"Open it: {tensorboard_command()} --logdir {out_dir}")
