"""`trainsentry graph`, and msprobe's spelling of it: `graph_visualize`."""

import argparse
import enum
import time
from pathlib import Path
from typing import Annotated

import typer

from trainsentry.exporters.files.foreign_files import InputError, read_object
from trainsentry.exporters.graph.database import SUFFIX, write_database
from trainsentry.exporters.graph.drawing import Legend
from trainsentry.exporters.graph.vis_file import write_vis_files
from trainsentry.exporters.short_text import counted
from trainsentry.monitor.cli.console import ProblemPrinter, bad_input, err, out, parse_steps, tensorboard_command
from trainsentry.monitor.offline.compared_graphs import PRECISION, Matching
from trainsentry.monitor.offline.graph_pairs import GraphRequest, graph_pairs


class GraphFormat(str, enum.Enum):
    """The form of a graph's file."""

    DB = "db"
    VIS = "vis"


def graph_command(
    source: Annotated[
        Path, typer.Argument(metavar="DUMP_OR_RUN", help="A dump at level L0 or mix, or a monitored run.")
    ],
    other: Annotated[Path | None, typer.Argument(metavar="[OTHER]", help="Another one, to compare with.")] = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder for graph.vis.db, or a name that ends in .vis.db.")
    ] = Path("graph"),
    overflow_check: Annotated[
        bool, typer.Option("--overflow-check", help="Mark NaN, Inf and norms that grow a hundredfold (a dump).")
    ] = False,
    form: Annotated[
        GraphFormat, typer.Option("--format", help="db; or vis: JSON, a file for each step and rank.")
    ] = GraphFormat.DB,
    steps: Annotated[str | None, typer.Option(help="A step, or steps such as 10-20.")] = None,
    names: Annotated[
        Path | None,
        typer.Option("--names", help='JSON that maps name prefixes of the first to those of OTHER: {"a": "b"}.'),
    ] = None,
    fuzzy: Annotated[
        bool, typer.Option("--fuzzy", help="Match operations by name and place in their module, whatever their number.")
    ] = False,
) -> None:
    """Draw a dump or a monitored run as the graph that msprobe's TensorBoard plugin shows, one or two compared.

    Example: trainsentry graph dump_npu dump_gpu -o logs --overflow-check; then tensorboard --logdir logs
    """
    request = GraphRequest(parse_steps(steps), overflow_check, Matching(_prefixes(names), fuzzy))
    _write(source, other, output, request, form)


def graph_visualize_command(context: typer.Context) -> None:
    """Draw a dump as msprobe's `graph_visualize` does; see `trainsentry graph`."""
    parser = argparse.ArgumentParser(
        "trainsentry graph_visualize", description="msprobe's options; see trainsentry graph."
    )
    parser.add_argument("-tp", "--target_path", type=Path, required=True, help="a dump")
    parser.add_argument("-gp", "--golden_path", type=Path, help="the dump to compare with")
    parser.add_argument("-o", "--output_path", type=Path, required=True, help="folder for the database")
    parser.add_argument("-oc", "--overflow_check", action="store_true", help="mark overflows")
    parser.add_argument("-fm", "--fuzzy_match", action="store_true", help="match whatever the numbers of calls")
    for name in ("-tensor_log", "--is_print_compare_log"), ("-progress_log", "--is_print_progress_log"):
        parser.add_argument(*name, action="store_true", help="accepted, without effect")
    given = parser.parse_args(context.args)
    kind = "compare" if given.golden_path else "build"
    output = given.output_path / f"{kind}_{time.strftime('%Y%m%d%H%M%S')}{SUFFIX}"
    request = GraphRequest(None, given.overflow_check, Matching(fuzzy=given.fuzzy_match))
    _write(given.target_path, given.golden_path, output, request, GraphFormat.DB)


def _prefixes(path: Path | None) -> dict[str, str]:
    if path is None:
        return {}
    try:
        found = read_object(path)
    except (OSError, InputError) as error:
        bad_input(f"--names: {error}")
    if not all(isinstance(v, str) for v in found.values()):
        bad_input(f"--names: {path}: holds a value that is not a text; allowed: an object that maps texts to texts")
    return found


def _write(source: Path, other: Path | None, output: Path, request: GraphRequest, form: GraphFormat) -> None:
    """Write the graphs and say where they are and how they are opened."""
    folder = output.parent if output.name.endswith(SUFFIX) else output
    path = output if output.name.endswith(SUFFIX) else output / f"graph{SUFFIX}"
    pairs = graph_pairs(source, other, request, ProblemPrinter())
    try:
        if form is GraphFormat.VIS:
            legend, path = write_vis_files(folder, pairs, marked=request.overflow_check), folder
        else:
            legend = write_database(path, pairs, marked=request.overflow_check)
    except InputError as error:
        bad_input(str(error))
    except OSError as error:
        bad_input(f"{error.filename or path}: {error.strerror or error}")
    _show(legend, path, folder)


def _show(legend: Legend, path: Path, folder: Path) -> None:
    counts = (
        f"{counted(legend.nodes, 'node')}, {counted(len(legend.steps), 'step')}, {counted(len(legend.ranks), 'rank')}"
    )
    out.print(f"{path}: {counts}", soft_wrap=True)
    if legend.compared:
        counts = ", ".join(f"{legend.precisions[value]} {word}" for word, value in PRECISION.items())
        out.print(f"compared by {legend.mode}: {counts}, {legend.unmatched} without a match", soft_wrap=True)
    err.print(f"{tensorboard_command()} --logdir {folder}   (pip install tb-graph-ascend)", soft_wrap=True)
