"""Writes graphs as the database that msprobe's TensorBoard plugin opens: `<name>.vis.db`, SQLite with three tables.

The tables and their columns are those of msprobe 26.2.0 (`tb_nodes`, `tb_config`, `tb_stack`); tb-graph-ascend 8.3.2
reads the same ones, except `is_distributed`.
"""

import contextlib
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from trainsentry.collectors.shared.private_files import new_private_file
from trainsentry.exporters.graph.call_graph import CallGraph
from trainsentry.exporters.graph.drawing import CHECKSUMS, GraphPair, Legend, inputs_and_outputs

SUFFIX: Final = ".vis.db"
"""The end of a database's name, by which the plugin finds it."""

_NODES: Final = {
    "id": "TEXT PRIMARY KEY",
    "graph_id": "TEXT NOT NULL",
    "node_order": "INTEGER NOT NULL",
    "node_name": "TEXT NOT NULL",
    "node_type": "TEXT NOT NULL",
    "up_node": "TEXT",
    "sub_nodes": "TEXT",
    "precision_index": "INTEGER",
    "overflow_level": "TEXT",
    "micro_step_id": "INTEGER NOT NULL",
    "matched_node_link": "TEXT",
    "stack_id": "TEXT",
    "parallel_merge_info": "TEXT",
    "matched_distributed": "TEXT",
    "modified": "INTEGER NOT NULL",
    "input_data": "TEXT",
    "output_data": "TEXT",
    "data_source": "TEXT",
    "dump_data_dir": "TEXT",
    "step": "INTEGER NOT NULL",
    "rank": "INTEGER NOT NULL",
    "is_distributed": "INTEGER",
}
_CONFIG: Final = {
    "id": "TEXT PRIMARY KEY",
    "graph_type": "TEXT NOT NULL",
    "task": "TEXT",
    "tool_tip": "TEXT",
    "micro_steps": "INTEGER",
    "overflow_check": "INTEGER",
    "node_colors": "TEXT NOT NULL",
    "rank_list": "TEXT NOT NULL",
    "step_list": "TEXT NOT NULL",
}
_STACKS: Final = {"id": "TEXT PRIMARY KEY", "stack_info": "TEXT"}
_TABLES: Final = {"tb_nodes": _NODES, "tb_config": _CONFIG, "tb_stack": _STACKS}

_INDEXES: Final = (
    "step, rank, data_source, up_node, node_order",
    "step, rank, data_source, node_name",
    "step, rank, data_source, node_order",
    "step, rank, node_order",
    "step, rank, micro_step_id, node_order",
    "step, rank, modified, matched_node_link",
    "is_distributed",
)
"""Columns of the plugin's queries."""

Row = tuple[Any, ...]


def write_database(path: Path, pairs: Iterable[GraphPair], *, marked: bool) -> Legend:
    """Write pairs to a database, one at a time; the old file is there until the new one is whole.

    Only its owner may read it, as the dumps that it is made of, and the plugin refuses a file that others may change.

    Raises:
        OSError: when it cannot be written.

    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    new_private_file(temporary).close()
    try:
        legend = _write(temporary, pairs, marked=marked)
        temporary.replace(path)
    except sqlite3.Error as error:
        raise OSError(0, str(error), str(path)) from error
    finally:
        for left in (temporary, temporary.with_name(f"{temporary.name}-journal")):
            with contextlib.suppress(OSError):
                left.unlink()
    return legend


def _write(path: Path, pairs: Iterable[GraphPair], *, marked: bool) -> Legend:
    legend = Legend(marked)
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        for table, columns in _TABLES.items():
            database.execute(f"CREATE TABLE {table} ({', '.join(f'{name} {kind}' for name, kind in columns.items())})")
        for pair in pairs:
            legend.take(pair)
            for side, graph in pair.sides:
                stacks: dict[tuple[str, ...], str] = {}
                rows = _node_rows(side, graph, stacks, checksums=pair.mode == CHECKSUMS)
                database.executemany(_insert("tb_nodes"), rows)
                texts = ((number, json.dumps(list(stack))) for stack, number in stacks.items())
                database.executemany(_insert("tb_stack"), texts)
        database.execute(_insert("tb_config"), _config_row(legend))
        for number, columns_of_index in enumerate(_INDEXES, 1):
            database.execute(f"CREATE INDEX index{number} ON tb_nodes ({columns_of_index})")
    return legend


def _insert(table: str) -> str:
    columns = _TABLES[table]
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"  # noqa: S608


def _node_rows(side: str, graph: CallGraph, stacks: dict[tuple[str, ...], str], *, checksums: bool) -> Iterator[Row]:
    """Yield the rows of a graph's nodes, and number their stacks."""
    identity = f"{side}_{graph.step}_{graph.rank}"
    for order, node in enumerate(graph.in_order()):
        stack = stacks.setdefault(tuple(node.stack), f"{identity}_{len(stacks)}")
        yield (
            f"{identity}_{node.name}",
            identity,
            order,
            node.name,
            str(node.kind),
            node.parent,
            json.dumps(node.children) if node.children else "",
            node.precision,
            node.overflow,
            node.micro_step or 0,
            json.dumps(node.path),
            stack,
            "",
            json.dumps(node.peers),
            0,
            *(json.dumps(values) for values in inputs_and_outputs(node, checksums=checksums)),
            side,
            graph.data_folder,
            graph.step,
            graph.rank,
            int(node.name.startswith("Distributed.")),
        )


def _config_row(legend: Legend) -> Row:
    return (
        "1",
        "compare" if legend.compared else "build",
        legend.mode,
        json.dumps(legend.tips) if legend.tips is not None else None,
        legend.micro_steps,
        int(legend.marked),
        json.dumps(legend.colours),
        json.dumps(sorted(legend.ranks)),
        json.dumps(sorted(legend.steps)),
    )
