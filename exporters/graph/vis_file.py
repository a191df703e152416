"""Writes graphs as JSON, `<name>.vis`: the form of msprobe up to 1.3, which tb-graph-ascend still reads."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from trainsentry.exporters.files.json_files import replace_text
from trainsentry.exporters.graph.call_graph import ROOT, CallGraph
from trainsentry.exporters.graph.drawing import CHECKSUMS, GraphPair, Legend, inputs_and_outputs

SUFFIX: Final = ".vis"
"""The end of a file's name, by which the plugin finds it."""

_PREFIXES: Final = {"NPU": "B___", "Bench": "N___"}
"""What a match's names begin with, by the side of the node that it is the match of."""


def write_vis_files(folder: Path, pairs: Iterable[GraphPair], *, marked: bool) -> Legend:
    """Write a file for each step and rank: `step<N>_rank<R>.vis`.

    Raises:
        OSError: when one cannot be written.

    """
    folder.mkdir(parents=True, exist_ok=True)
    whole = Legend(marked)
    for pair in pairs:
        whole.take(pair)
        legend = Legend(marked)
        legend.take(pair)
        path = folder / f"step{pair.graph.step}_rank{pair.graph.rank}{SUFFIX}"
        replace_text(path, json.dumps(_content(pair, legend)))
        path.chmod(0o600)  # as a database's: the plugin refuses a file that others may change
    return whole


def _content(pair: GraphPair, legend: Legend) -> dict[str, Any]:
    checksums = pair.mode == CHECKSUMS
    sides = {side: _graph(side, graph, checksums=checksums) for side, graph in pair.sides}
    content: dict[str, Any] = sides if pair.other is not None else sides["NPU"]
    if legend.compared:
        content |= {"ToolTip": json.dumps(legend.tips), "Colors": legend.colours, "task": legend.mode}
    return {**content, "MicroSteps": legend.micro_steps, "OverflowCheck": legend.marked}


def _graph(side: str, graph: CallGraph, *, checksums: bool) -> dict[str, Any]:
    nodes = {}
    for node in graph.in_order():
        inputs, outputs = inputs_and_outputs(node, checksums=checksums)
        data = {"precision_index": node.precision, "overflow_level": node.overflow}
        nodes[node.name] = {
            "id": node.name,
            "node_type": node.kind,
            "input_data": inputs,
            "output_data": outputs,
            "upnode": node.parent or "None",
            "subnodes": node.children,
            "matched_node_link": [_PREFIXES[side] + name for name in node.path],
            "suggestions": {},
            "stack_info": node.stack,
            "micro_step_id": node.micro_step or 0,
            "data": {key: value for key, value in data.items() if value is not None},
            **({"matched_distributed": node.peers} if node.peers else {}),
        }
    return {"root": ROOT, "dump_data_dir": graph.data_folder, "node": nodes}
