"""`trainsentry csv2tb`: converts CSV tables to TensorBoard event files."""

from pathlib import Path
from typing import Annotated

import typer

from trainsentry.exporters.convert.csv2tb import Conversion, csv2tb
from trainsentry.exporters.short_text import counted
from trainsentry.exporters.tensorboard.writer import MAX_RAW_TAGS
from trainsentry.monitor.cli.console import (
    INTERRUPTED,
    ProblemPrinter,
    bad_input,
    err,
    out,
    parse_steps,
    progress_bar,
    tensorboard_command,
)


def csv2tb_command(
    source: Annotated[Path, typer.Argument(help="An output directory, one rank's directory, or msprobe's output.")],
    target: Annotated[Path | None, typer.Argument(metavar="[OUT]", help="SOURCE/tensorboard_csv by default.")] = None,
    quantity: Annotated[
        list[str] | None, typer.Option(help="Convert only these tables, such as gradient,update.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Tables converted at a time.")] = 1,
    steps: Annotated[str | None, typer.Option(help="Convert only these steps, such as 10-20.")] = None,
    every: Annotated[int, typer.Option(min=1, help="Convert only every n-th step.")] = 1,
    full: Annotated[bool, typer.Option("--full", help="Convert every value; thin no series.")] = False,
    raw_tags: Annotated[
        int, typer.Option(min=-1, help="Tags of single series at most; above, only norms. -1: no limit.")
    ] = MAX_RAW_TAGS,
    time_start: Annotated[str | None, typer.Option(help="msprobe's directories from then on: Dec03_21-34-40.")] = None,
    time_end: Annotated[str | None, typer.Option(help="msprobe's directories up to this time.")] = None,
) -> None:
    """Convert the CSV tables of a run, ours or msprobe's, to TensorBoard event files.

    Tables of more than 1,000 steps are thinned to the lowest and the highest value of each bin of steps, so a spike of
    one step stays visible. A second run converts only what is new, also after Ctrl-C.

    Example: trainsentry csv2tb monitor_output --quantity gradient --steps 100-200
    """
    out_dir = target or source / "tensorboard_csv"
    problems = ProblemPrinter()
    with progress_bar() as bar:
        task = bar.add_task("converting", total=None)
        try:
            done = csv2tb(
                source,
                out_dir,
                problems,
                quantities=[name for given in quantity or () for name in given.split(",")],
                begin=lambda total: bar.update(task, total=total),
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
        except KeyboardInterrupt:
            bar.stop()
            err.print(
                f"Stopped. Finished tables stay in {out_dir}; the same command goes on with the others.", soft_wrap=True
            )
            raise typer.Exit(INTERRUPTED) from None
    if not done.scalars and not done.unchanged:
        bad_input(f"{source}: nothing to convert" + (f" in steps {steps}" if steps else ""))
    out.print(_said(done, out_dir, problems), soft_wrap=True)
    out.print(f"Open it: {tensorboard_command()} --logdir {out_dir}", soft_wrap=True)


def _said(done: Conversion, out_dir: Path, problems: ProblemPrinter) -> str:
    """Return what was written, and what was left out."""
    tables = f"{counted(done.tables, 'table')} and {counted(done.runs, 'run')}"
    parts = [f"wrote {counted(done.scalars, 'scalar')} of {tables} to {out_dir}"]
    if done.unchanged:
        parts.append(f"{counted(done.unchanged, 'table')} already up to date")
    if done.too_many:
        norms = counted(done.too_many, "table")
        parts.append(f"kept only the norms of {norms} (--raw-tags -1 keeps every series)")
    if done.thinned:
        parts.append(f"thinned {counted(done.thinned, 'table')} to the extremes (--full keeps all)")
    if problems.of_file:
        parts.append(f"left out {counted(problems.of_file.total(), 'malformed line')}")
    return "; ".join(parts)
