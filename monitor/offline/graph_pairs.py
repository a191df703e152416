"""Makes the graphs of dumps or of monitored runs, alone or in pairs, with overflows and incidents marked."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainsentry.anomaly.dumps.overflow_levels import overflow_level
from trainsentry.exporters.dumps.dump_reader import RankDump, read_dumps
from trainsentry.exporters.files.foreign_files import InputError, Report
from trainsentry.exporters.graph.call_graph import CallGraph, number_micro_steps
from trainsentry.exporters.graph.collective_peers import match_collectives
from trainsentry.exporters.graph.drawing import GraphPair
from trainsentry.exporters.graph.dumped_graph import graph_of_dump
from trainsentry.exporters.graph.run_graph import is_monitored_run, run_graphs
from trainsentry.monitor.offline.compared_graphs import Matching, compare_graphs


@dataclass(frozen=True)
class GraphRequest:
    """What is to be drawn: steps (None: all of a dump, the telling ones of a run), marks, and how nodes are matched."""

    steps: range | None = None
    overflow_check: bool = False
    matching: Matching = field(default_factory=Matching)


def graph_pairs(a: Path, b: Path | None, request: GraphRequest, report: Report) -> Iterator[GraphPair]:
    """Yield the graphs of `a` by step and rank, each with its counterpart in `b` where that is given.

    Unreadable files are reported and skipped.

    Raises:
        InputError: when a folder holds no graph, the two are of different kinds, or they have nothing in common.

    """
    for path in (a, b):
        if path is not None and not path.is_dir():
            raise InputError(f"{path}: {'is a file; allowed: a folder' if path.exists() else 'no such directory'}")
    kinds = [is_monitored_run(path) for path in (a, b) if path is not None]
    if len(set(kinds)) > 1:
        raise InputError(f"{a} and {b} are a monitored run and a dump; allowed: two of one kind")
    ours = sorted(_graphs(a, request, report, is_run=kinds[0]), key=lambda graph: (graph.step, graph.rank))
    if b is None:
        _match_ranks(ours)
        yield from (GraphPair(graph, None, number_micro_steps(graph)) for graph in ours)
        return
    if kinds[0] and request.steps is None:  # what tells in one run is looked at in the other
        others = run_graphs(b, [range(step, step + 1) for step in sorted({graph.step for graph in ours})], report)
    else:
        others = _graphs(b, request, report, is_run=kinds[0])
    pairs = _paired(ours, others, a, b)
    modes = [compare_graphs(graph, other, request.matching) for graph, other in pairs]
    for side in zip(*pairs, strict=True):  # the plugin shows the other ranks' verdicts
        _match_ranks(side)
    for (graph, other), mode in zip(pairs, modes, strict=True):
        yield GraphPair(graph, other, number_micro_steps(graph, other), mode)


def _match_ranks(graphs: Sequence[CallGraph]) -> None:
    for step in {graph.step for graph in graphs}:
        match_collectives([graph for graph in graphs if graph.step == step])


def _graphs(path: Path, request: GraphRequest, report: Report, *, is_run: bool) -> list[CallGraph]:
    if is_run:
        return run_graphs(path, None if request.steps is None else [request.steps], report)
    return _of_dumps(path, request, report)


def _of_dumps(path: Path, request: GraphRequest, report: Report) -> list[CallGraph]:
    """Return the graphs of the dumps that have a tree; if none has one, the first one's error is raised."""
    wanted = [dump for dump in read_dumps(path, report) if request.steps is None or dump.step in request.steps]
    if not wanted:
        raise InputError(f"{path}: holds no dump of the steps asked for")
    graphs: list[CallGraph] = []
    problems: list[tuple[Path, str]] = []
    for dump in wanted:
        try:
            graphs.append(_of_dump(dump, request))
        except InputError as error:
            problems.append((dump.directory, str(error)))
    if not graphs:
        raise InputError(problems[0][1])
    for folder, problem in problems:
        report(folder, 0, problem.removeprefix(f"{folder}: "))
    return graphs


def _of_dump(dump: RankDump, request: GraphRequest) -> CallGraph:
    graph = graph_of_dump(dump)
    if request.overflow_check:
        for node in graph.nodes.values():
            node.overflow = overflow_level(node.name, dump.calls.get(node.name))
    return graph


def _paired(ours: list[CallGraph], others: list[CallGraph], a: Path, b: Path) -> list[tuple[CallGraph, CallGraph]]:
    """Pair the graphs of equal step and rank; one graph each is a pair whatever its step and rank."""
    theirs = {(graph.step, graph.rank): graph for graph in others}
    if len(ours) == len(theirs) == 1:
        [other] = others
        other.step, other.rank = ours[0].step, ours[0].rank
        theirs = {(other.step, other.rank): other}
    pairs = [(graph, theirs[graph.step, graph.rank]) for graph in ours if (graph.step, graph.rank) in theirs]
    if not pairs:
        raise InputError(f"{a} and {b} have no step and rank in common")
    return pairs
