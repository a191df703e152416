"""Makes the graph of a monitored run: its modules, the statistics of a step, and what was found in them.

The plugin's marks of overflow show the findings: critical is an incident's first suspect, high another suspect, medium
an abnormal value; a module has the worst mark in it. The sentences stand where a dump has the stack of a call.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainsentry.collectors.series import (
    ACTIVATION_GRAD_INPUT,
    ACTIVATION_GRAD_OUTPUT,
    ACTIVATION_INPUT,
    ACTIVATION_OUTPUT,
    BUFFER,
    GRADIENT,
    PARAMETER,
)
from trainsentry.exporters.csv.format import TableFile
from trainsentry.exporters.csv.part_rows import rows_of_parts
from trainsentry.exporters.csv.reader import rows_of
from trainsentry.exporters.csv.table_parts import newest_part, parts_of, tables_in
from trainsentry.exporters.csv.table_rows import RowKeys, by_step
from trainsentry.exporters.files.foreign_fields import anything, checked, objects, text
from trainsentry.exporters.files.foreign_files import MAX_OBJECT_BYTES, InputError, Report, parse_json, read_object
from trainsentry.exporters.graph.call_graph import GRADIENTS, INPUT, OUTPUT, PARAMETERS, ROOT, CallGraph, NodeValue
from trainsentry.exporters.run_reader import RecordedRun, anomalies_since, read_run

MAX_STEPS: Final = 16
"""Steps that are drawn: a step of a large model has some ten thousand values."""

MAX_ANOMALIES: Final = 10_000
"""Anomalies of a rank that are read, the first ones."""

LAST_BYTES: Final = 1 << 20
"""Bytes of a table's end in which its last step is looked for."""

FORWARD, BACKWARD = "forward", "backward"

_PLACES: Final = {
    ACTIVATION_INPUT: (FORWARD, INPUT),
    PARAMETER: (FORWARD, PARAMETERS),
    BUFFER: (FORWARD, PARAMETERS),
    ACTIVATION_OUTPUT: (FORWARD, OUTPUT),
    ACTIVATION_GRAD_OUTPUT: (BACKWARD, INPUT),
    GRADIENT: (BACKWARD, GRADIENTS),
    ACTIVATION_GRAD_INPUT: (BACKWARD, OUTPUT),
}
"""The pass and the part of a module's node that a table belongs to; a backward pass takes the output's gradient."""

_NUMBERS: Final = {"max": "Max", "min": "Min", "mean": "Mean", "norm": "Norm", "nans": "nans", "infs": "infs"}
"""Columns of a table, and the members of a value that they become."""

_TENSOR_OF: Final = re.compile(r"(?:(?P<module>.*)\.)?(?P<place>(?:input|output)(?:\..*)?)", re.DOTALL)

_LEVELS: Final = ("medium", "high", "critical")

_Values = dict[str, dict[str, NodeValue]]
"""A step's values by node and series."""


@dataclass
class _Model:
    """A rank's modules by name, in their order, with their class; and the module of each parameter."""

    modules: dict[str, str]
    owners: dict[str, str]

    def owner(self, name: str) -> str | None:
        """Return the innermost module of a name; None for what belongs to no module."""
        while name and name not in self.modules:
            name = name.rpartition(".")[0]
        return name if name in self.modules else None


@dataclass(frozen=True)
class _Finding:
    """What was found in a module, at which steps: quantity and name of the series, level, and a sentence."""

    steps: range
    module: str
    quantity: str
    name: str
    level: int
    sentence: str


def is_monitored_run(path: Path) -> bool:
    """Return whether a folder is the output of a monitored run."""
    return (path / "run.json").is_file() or any(path.glob("rank*/graph.json"))


def run_graphs(root: Path, steps: Sequence[range] | None, report: Report) -> list[CallGraph]:
    """Return the graphs of a run: of `steps`, or of the steps of its incidents and the last one.

    Raises:
        InputError: when no rank has a model, or none has one of the steps.

    """
    run = read_run(root, report)
    models = {rank: model for rank in run.ranks if (model := _model(root / f"rank{rank}" / "graph.json", report))}
    if not models:
        raise InputError(f"{root}: no rank has a graph.json with modules, and a graph is drawn from it")
    top = root.resolve()
    graphs: list[CallGraph] = []
    for rank, model in models.items():
        tables = {name: files for name, files in tables_in(top / f"rank{rank}", top).items() if name in _PLACES}
        wanted = steps if steps is not None else _telling_steps(run, tables, report)
        found = _rows(tables, wanted, model, report)
        if len(found) > MAX_STEPS:
            report(root / f"rank{rank}", 0, f"{len(found) - MAX_STEPS} more steps than the {MAX_STEPS} that are drawn")
        findings = _findings(run, rank, model, report)
        graphs += [_graph(step, rank, model, found[step], findings) for step in sorted(found)[:MAX_STEPS]]
    if not graphs:
        raise InputError(f"{root}: has no recorded values of modules at the steps asked for")
    return graphs


def _model(path: Path, report: Report) -> _Model | None:
    try:
        content = read_object(path, MAX_OBJECT_BYTES)
    except FileNotFoundError:
        return None
    except (InputError, OSError) as error:
        report(path, 0, str(error).removeprefix(f"{path}: "))
        return None
    kinds = {"modules": objects({"name": text, "type": text}, frozenset({"name"})), "parameters": anything(dict)}
    found = checked(content, kinds)
    modules = {item["name"]: item.get("type", "") for item in found.get("modules", [])}
    owners = {name: owner for name, owner in found.get("parameters", {}).items() if isinstance(owner, str)}
    return _Model(modules, owners) if modules else None


def _telling_steps(run: RecordedRun, tables: dict[str, list[TableFile]], report: Report) -> list[range]:
    """Return the steps where incidents began, the worst ones, and the last step with values of most modules."""
    began = [i.get("first_seen", i.get("step")) for i in run.incidents]
    chosen = list(dict.fromkeys(step for step in began if step is not None))[: MAX_STEPS - 1]
    files = next((tables[name] for name in (ACTIVATION_OUTPUT, GRADIENT, PARAMETER) if name in tables), [])
    last = newest_part(parts_of(files, range(1 << 53), report), LAST_BYTES)
    if last is not None:
        steps = [int(s) for _, at in rows_of_parts([last], RowKeys(), ("norm",), report) for s in at[-1:].tolist()]
        chosen += steps[-1:]
    return [range(step, step + 1) for step in sorted(set(chosen))]


def _rows(
    tables: dict[str, list[TableFile]], wanted: Sequence[range], model: _Model, report: Report
) -> dict[int, _Values]:
    """Return the values by step, pass and module in one name, and series; a later start or micro-step wins."""
    found: dict[int, _Values] = {}
    for table, files in sorted(tables.items(), key=lambda item: list(_PLACES).index(item[0])):
        keys = RowKeys()
        for steps in wanted:
            pieces = rows_of_parts(parts_of(files, steps, report), keys, tuple(_NUMBERS), report)
            for rows in (rows for piece, at in pieces for rows in by_step(piece, at) if rows.step in steps):
                of_step = found.setdefault(rows.step, {})
                for row in rows_of(rows, keys, table):
                    placed = _placed(table, row.name, model)
                    if placed is not None:
                        node, part, place = placed
                        facts = _facts(row.values, row.shape, row.dtype)
                        of_step.setdefault(node, {})[f"{table}/{row.name}"] = NodeValue(f"{node}.{place}", part, facts)
    return found


def _placed(table: str, name: str, model: _Model) -> tuple[str, str, str] | None:
    """Return the node, the part and the place in it of a series; None for one of no module."""
    direction, part = _PLACES[table]
    if part in {PARAMETERS, GRADIENTS}:
        module = model.owner(model.owners.get(name, name))
        place = f"{part}.{name.removeprefix(f'{module}.')}"
    else:
        match = _TENSOR_OF.fullmatch(name)
        module = model.owner(match["module"] or "") if match is not None else None
        place = part + match["place"].partition(".")[1] + match["place"].partition(".")[2] if match else ""
    return (_node_name(module, model, direction), part, place) if module is not None else None


def _node_name(module: str, model: _Model, direction: str) -> str:
    """Return a module's node, named as msprobe names the first call."""
    return ".".join(["Module", *([module] if module else []), model.modules[module] or "Module", direction, "0"])


def _facts(numbers: dict[str, float], shape: str, dtype: str) -> dict[str, Any]:
    try:
        sizes = parse_json(shape)
    except InputError:
        sizes = shape
    known = {member: numbers[column] for column, member in _NUMBERS.items() if column in numbers}
    return {"type": "tensor", "dtype": dtype, "shape": sizes, **known}


def _findings(run: RecordedRun, rank: int, model: _Model, report: Report) -> list[_Finding]:
    """Return what incidents and anomalies say of a rank's modules, the worst first."""
    found: list[_Finding | None] = []
    for incident in run.incidents:
        first = incident.get("first_seen", incident.get("step", 0))
        seen = range(first, incident.get("last_seen", first) + 1)
        for place, suspect in enumerate(incident.get("suspects", [])):
            if suspect["rank"] == rank:
                sentence = f"incident {incident.get('id', '?')}, suspect {place + 1}: {suspect.get('evidence', '')}"
                found.append(_finding(seen, suspect, 1 if place else 2, sentence, model))
    for anomaly in anomalies_since(run.root / f"rank{rank}", 0, MAX_ANOMALIES, report)[0]:
        sentence = f"{anomaly.get('kind', 'abnormal')}: {anomaly['quantity']} {anomaly['name']}"
        sentence += f", {anomaly.get('statistic', '')} {anomaly.get('value', '')}"
        found.append(_finding(range(anomaly["step"], anomaly["step"] + 1), anomaly, 0, sentence, model))
    return sorted((finding for finding in found if finding is not None), key=lambda f: -f.level)


def _finding(steps: range, line: dict[str, Any], level: int, sentence: str, model: _Model) -> _Finding | None:
    """Return a finding; None for what belongs to no module, such as the loss."""
    name = line["name"]
    module = model.owner(line.get("module") or model.owners.get(name, name))
    return _Finding(steps, module, line["quantity"], name, level, sentence) if module else None


def _graph(step: int, rank: int, model: _Model, values: _Values, found: Sequence[_Finding]) -> CallGraph:
    """Return the graph of a step: the modules' forward passes in their order, then their backward passes."""
    graph = CallGraph(step, rank, "statistics")
    backward = any(f".{BACKWARD}." in node for node in values)
    for direction in (FORWARD, BACKWARD) if backward else (FORWARD,):
        order = list(model.modules) if direction == FORWARD else list(model.modules)[::-1]
        for module in order:
            graph.add(_node_name(module, model, direction))
        for module in order:
            graph.put_below(_node_name(module, model, direction), _parent(module, model, direction))
    for name, series in values.items():
        graph.nodes[name].values = list(series.values())
    for finding in (f for f in found if step in f.steps):
        direction = _PLACES.get(finding.quantity, (BACKWARD,))[0] if backward else FORWARD
        node = graph.nodes[_node_name(finding.module, model, direction)]
        node.overflow = node.overflow or _LEVELS[finding.level]  # the worst comes first
        node.stack.append(finding.sentence)
        value = values.get(node.name, {}).get(f"{finding.quantity}/{finding.name}")
        if value is not None:
            value.facts.setdefault("found", finding.sentence)
    _roll_up(graph)
    return graph


def _roll_up(graph: CallGraph) -> None:
    """Give each module the worst mark in it, so that a closed one shows where to look."""
    for node in graph.in_order():
        marks = [graph.nodes[child].overflow for child in node.children] if node.name != ROOT else []
        node.overflow = max([node.overflow, *marks], key=lambda mark: _LEVELS.index(mark) if mark else -1)


def _parent(module: str, model: _Model, direction: str) -> str:
    above = model.owner(module.rpartition(".")[0]) if module else None
    return ROOT if above is None else _node_name(above, model, direction)
