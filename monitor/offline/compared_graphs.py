"""Compares two graphs of calls: which nodes match, how far apart their values are, and msprobe's verdict."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trainsentry.anomaly.dumps.call_verdicts import STATISTICS, ValuePair, judge, measure_statistics
from trainsentry.anomaly.dumps.dump_comparison import renamed
from trainsentry.anomaly.dumps.tensor_difference import of_values
from trainsentry.exporters.files.foreign_files import InputError
from trainsentry.exporters.graph.call_graph import (
    COLLECTION,
    GRADIENTS,
    INPUT,
    OPERATION,
    OUTPUT,
    PARAMETERS,
    CallGraph,
    GraphNode,
    NodeValue,
)
from trainsentry.exporters.graph.drawing import CHECKSUMS, STRUCTURE, SUMMARY, TENSORS
from trainsentry.monitor.offline.compare_runs import load_array

PRECISION: Final = {"pass": 0.0, "warning": 0.5, "error": 1.0}

_COUNT: Final = re.compile(r"\.\d+(?=\.)", re.ASCII)


@dataclass(frozen=True)
class Matching:
    """How nodes are matched: by equal names and equal parents; with `names`, prefixes of A's names are those of B's.

    `fuzzy` matches modules whatever their parents, and operations in them by name and place, whatever their number.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    fuzzy: bool = False


def compare_graphs(a: CallGraph, b: CallGraph, matching: Matching | None = None) -> str:
    """Match the nodes of two graphs, note precision, measures and reasons in those of `a`; return what was compared.

    The parts of a node are compared value by value in their order, as msprobe does.

    Raises:
        InputError: when a tensor's file cannot be read.

    """
    mode = _mode(a, b)
    matched = _matched(a, b, matching or Matching())
    for name, other in matched.items():
        a.nodes[name].path, b.nodes[other].path = b.path_to(other), a.path_to(name)
    for name, other in matched.items():
        if mode != STRUCTURE:
            _judge(a.nodes[name], b.nodes[other], mode, (Path(a.data_folder), Path(b.data_folder)))
    for node in a.nodes.values():
        if node.kind == COLLECTION:
            node.precision = max([0.0, *(a.nodes[child].precision or 0.0 for child in node.children)])
    return mode


def _mode(a: CallGraph, b: CallGraph) -> str:
    if STRUCTURE in {a.task, b.task}:
        return STRUCTURE
    if a.task == b.task == "tensor":
        return TENSORS
    return CHECKSUMS if a.checksums and b.checksums else SUMMARY


def _matched(a: CallGraph, b: CallGraph, matching: Matching) -> dict[str, str]:
    """Return the names of the nodes of `a` that have a match, and the match's."""
    found: dict[str, str] = {}
    for node in a.from_the_top():
        if matching.fuzzy and node.kind == OPERATION:
            continue
        other = renamed(node.name, matching.names)
        if other in b.nodes and (matching.names or matching.fuzzy or a.path_to(node.name) == b.path_to(other)):
            found[node.name] = other
            if matching.fuzzy:
                theirs = _operations(b, b.nodes[other])
                found |= {o: theirs[key] for key, o in _operations(a, node).items() if key in theirs}
    return found


def _operations(graph: CallGraph, node: GraphNode) -> dict[tuple[str, int], str]:
    """Return the operations of a module by name without number, and place among those of that name."""
    seen: Counter[str] = Counter()
    found = {}
    for child in node.children:
        if graph.nodes[child].kind == OPERATION:
            name = _COUNT.sub("", child)
            found[name, seen[name]] = child
            seen[name] += 1
    return found


def _judge(node: GraphNode, other: GraphNode, mode: str, folders: tuple[Path, Path]) -> None:
    pairs: list[tuple[NodeValue, ValuePair]] = []
    for part in (INPUT, PARAMETERS, OUTPUT, GRADIENTS):
        for x, y in zip_longest(node.of_part(part), other.of_part(part)):
            if x is not None:
                pairs.append((x, _pair(x, y, mode, folders)))
    verdict = judge(node.name, [pair for _, pair in pairs], mode)
    node.precision = PRECISION[verdict] if verdict is not None else None
    for value, pair in pairs:
        value.figures = _figures(pair) if pair.a or pair.b else {}


def _pair(a: NodeValue, b: NodeValue | None, mode: str, folders: tuple[Path, Path]) -> ValuePair:
    pair = ValuePair(a.part == OUTPUT, a.facts, b.facts if b is not None else None)
    if mode == SUMMARY:
        pair.measures = measure_statistics(pair.a, pair.b)
    elif mode == TENSORS:
        pair.measures = _measure_tensors(*(_array(v, folder) for v, folder in zip((a, b), folders, strict=True)))
    return pair


def _array(value: NodeValue | None, folder: Path) -> npt.NDArray[Any] | None:
    """Return a value's saved tensor, or None if it has none; its name cannot leave the folder."""
    name = value.facts.get("data_name") if value is not None else None
    path = folder / Path(str(name)).name
    if not name or not path.is_file():
        return None
    found: npt.NDArray[Any] = load_array(path)
    return found


def _measure_tensors(a: npt.NDArray[Any] | None, b: npt.NDArray[Any] | None) -> dict[str, Any]:
    """Return msprobe's measures of two tensors; None where one was not saved, or their shapes differ."""
    names = (
        "Cosine",
        "EucDist",
        "MaxAbsErr",
        "MaxRelativeErr",
        "One Thousandth Err Ratio",
        "Five Thousandths Err Ratio",
    )
    if a is None or b is None or a.shape != b.shape or not a.size:
        return dict.fromkeys(names)
    try:
        whole = of_values(a, b)
        x, y = (np.asarray(v, np.complex128 if np.iscomplexobj(v) else np.float64).ravel() for v in (a, b))
        with np.errstate(all="ignore"):
            apart = np.abs(x - y)
            relative = np.divide(apart, np.abs(y), out=np.where(apart > 0, np.inf, 0.0), where=y != 0)
            shares = [float(np.mean(relative < limit)) for limit in (0.001, 0.005)]
            distance = float(np.linalg.norm(apart[np.isfinite(apart)]))
    except MemoryError:
        raise InputError("two tensors do not fit in memory") from None
    numbers = (whole.cosine, distance, whole.max_absolute, whole.max_relative, *shares)
    measures = dict(zip(names, numbers, strict=True))
    # Of one number, direction and share say nothing: msprobe does not judge by them.
    return measures if a.ndim and a.size > 1 else measures | dict.fromkeys(("Cosine", names[4], names[5]))


_RELATIVE: Final = frozenset(relative for _, relative in STATISTICS.values())


def _figures(pair: ValuePair) -> dict[str, Any]:
    """Return the columns that the plugin shows behind a value; relative errors of statistics are in per cent."""
    has_statistics = "Max diff" in pair.measures
    found: dict[str, Any] = {}
    for name, value in pair.measures.items():
        in_percent = has_statistics and name in _RELATIVE and value is not None
        found[name] = "N/A" if value is None else f"{100 * value:.6f}%" if in_percent else value
    if pair.b is not None:
        found["Requires_grad Consistent"] = pair.a.get("requires_grad") == pair.b.get("requires_grad")
    return {**found, "Result": pair.status, "Err_message": "; ".join(pair.reasons)}
