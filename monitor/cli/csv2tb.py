"""`trainsentry csv2tb`."""

from pathlib import Path
from typing import Annotated

import typer

from trainsentry.exporters.convert.csv2tb import csv2tb
from trainsentry.exporters.tensorboard.writer import MAX_RAW_TAGS
from trainsentry.monitor.cli.console import (
    ProblemPrinter,
    bad_input,
    out,
    parse_steps,
    progress_bar,
    tensorboard_command,
)


def csv2tb_command(
    source: Annotated[Path, typer.Argument(help="An output directory, one rank's, or msprobe's of either monitor.")],
    target: Annotated[Path | None, typer.Argument(metavar="[OUT]", help="SOURCE/tensorboard_csv by default.")] = None,
    quantity: Annotated[list[str] | None, typer.Option(help="Only these, such as gradient,update.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Tables converted at a time.")] = 1,
    steps: Annotated[str | None, typer.Option(help="Convert only these steps, such as 10-20.")] = None,
    every: Annotated[int, typer.Option(min=1, help="Convert every n-th step only.")] = 1,
    full: Annotated[bool, typer.Option("--full", help="Convert every value of series of any length.")] = False,
    raw_tags: Annotated[int, typer.Option(min=-1, help="Most tags of single series; -1: all.")] = MAX_RAW_TAGS,
    time_start: Annotated[str | None, typer.Option(help="msprobe's directories from this time on.")] = None,
    time_end: Annotated[str | None, typer.Option(help="… up to this time, such as Dec03_21-34-40.")] = None,
) -> None:
    """Convert the CSV tables of a run, ours or msprobe's, to TensorBoard event files.

    Tables of more than 1,000 steps are thinned to the lowest and the highest value of each bin of steps, so that what
    lasted one step is still seen. Run again, the command goes on with what has come.

    Example: trainsentry csv2tb monitor_output --quantity gradient --steps 100-200
    """
    out_dir = target or source / "tensorboard_csv"
    problems = ProblemPrinter()
    with progress_bar() as bar:
        task = bar.add_task("converting", total=_bytes(source))
        try:
            done = csv2tb(
                source,
                out_dir,
                problems,
                quantities=[name for given in quantity or () for name in given.split(",")],
                jobs=jobs,
                steps=parse_steps(steps),
                every=every,
                full=full,
                raw_tags=raw_tags,
                time_start=time_start,
                time_end=time_end,
                progress=lambda table, read: bar.update(task, description=table, advance=read),
            )
        except (ValueError, OSError) as error:
            bad_input(str(error))
    if not done.scalars and not done.unchanged:
        bad_input(f"{source}: nothing to convert" + (f" in steps {steps}" if steps else ""))
    out.print(
        f"{done.scalars} scalars of {done.tables} tables and {done.runs} runs written to {out_dir}"
        + (f"; {done.unchanged} tables were up to date" if done.unchanged else "")
        + (f"; single series of {done.too_many} tables left out (--raw-tags -1 keeps them)" if done.too_many else "")
        + (f"; {done.thinned} tables thinned to their extremes (--full keeps all)" if done.thinned else "")
        + (f"; {problems.of_file.total()} malformed lines left out" if problems.of_file else ""),
        soft_wrap=True,
    )
    out.print(f"Open it: {tensorboard_command()} --logdir {out_dir}", soft_wrap=True)


def _bytes(source: Path) -> int:
    """Return the size of all tables, for the progress bar."""
    return sum(path.stat().st_size for path in source.glob("**/*.csv") if path.is_file()) or 1
