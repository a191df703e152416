"""The model's modules as a tree in which what is abnormal stands out."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from trainsentry.exporters.files.foreign_files import MAX_OBJECT_BYTES, InputError, read_object
from trainsentry.exporters.run_reader import RecordedRun

HEALTHY, ABNORMAL, SUSPECT = range(3)
"""A module's state: nothing was found in it, one of its values is abnormal, it is the first suspect of an incident."""

MAX_RANKS: Final = 8
"""Ranks whose modules are shown together: the stages of a pipeline have different ones."""

MOST_MODULES: Final = 2_000
"""Modules in the tree, those that are not healthy first; a page with more is slow to search."""

DEEPEST: Final = 24
"""Levels of the tree; what lies deeper is one line with the rest of its name."""


@dataclass
class Node:
    """A module: its whole name, the part below its parent, its class, its state, and the worst state in it."""

    name: str
    label: str
    kind: str = ""
    state: int = HEALTHY
    worst: int = HEALTHY
    series: set[tuple[str, str]] = field(default_factory=set)
    since: int | None = None
    incidents: list[int] = field(default_factory=list)
    children: dict[str, "Node"] = field(default_factory=dict)


def module_tree(run: RecordedRun, anomalies: Iterable[Mapping[str, Any]]) -> tuple[Node, int] | None:
    """Return the tree of the model, and how many modules it leaves out; None where no module is known."""
    kinds = _kinds(run.root, list(run.ranks)[:MAX_RANKS])
    if not kinds:
        return None
    found = _found(run, anomalies, kinds)
    order = sorted(kinds, key=lambda name: -found[name].state if name in found else HEALTHY)  # stable
    root = Node("", "model", kinds.get("", ""))
    for name in _in_order(order[:MOST_MODULES], kinds):
        _add(root, name, kinds[name], found.get(name))
    _roll_up(root)
    return root, max(0, len(kinds) - MOST_MODULES)


def _in_order(chosen: Iterable[str], kinds: Mapping[str, str]) -> Iterator[str]:
    """Yield the chosen names in the model's order."""
    wanted = set(chosen)
    return (name for name in kinds if name in wanted)


def _kinds(root: Path, ranks: Iterable[int]) -> dict[str, str]:
    """Return the classes of the modules of these ranks by name, in the order of `graph.json`."""
    kinds: dict[str, str] = {}
    for rank in ranks:
        try:
            modules = read_object(root / f"rank{rank}" / "graph.json", MAX_OBJECT_BYTES).get("modules")
        except (InputError, OSError):
            continue  # an older version wrote none
        for module in modules if isinstance(modules, list) else ():
            if isinstance(module, dict) and isinstance(module.get("name"), str):
                kinds.setdefault(module["name"], str(module.get("type", "")))
    return kinds


def _found(run: RecordedRun, anomalies: Iterable[Mapping[str, Any]], kinds: Mapping[str, str]) -> dict[str, Node]:
    """Return what was found in each module that is not healthy."""
    found: dict[str, Node] = {}
    for anomaly in anomalies:
        name = _owner(anomaly, kinds)
        if name is not None:
            node = found.setdefault(name, Node(name, "", state=ABNORMAL))
            node.series.add((anomaly["quantity"], anomaly["name"]))
            node.since = min(anomaly["step"], node.since if node.since is not None else anomaly["step"])
    for incident in run.incidents:
        for suspect in incident.get("suspects", [])[:1]:
            name = _owner(suspect, kinds)
            if name is not None:
                node = found.setdefault(name, Node(name, "", since=suspect["step"]))
                node.state = SUSPECT
                node.incidents.append(incident.get("id", 0))
    return found


def _owner(finding: Mapping[str, Any], kinds: Mapping[str, str]) -> str | None:
    """Return the innermost known module of a finding; None for what belongs to no module, such as the loss."""
    name = str(finding.get("module") or finding.get("name", ""))
    while name and name not in kinds:
        name = name.rpartition(".")[0]
    return name or None


def _add(root: Node, name: str, kind: str, found: Node | None) -> None:
    """Add a module below its parents, which need no line of their own in `graph.json`."""
    node, parts = root, name.split(".", DEEPEST - 1) if name else []
    for depth, part in enumerate(parts, 1):
        node = node.children.setdefault(part, Node(".".join(parts[:depth]), part))
    node.kind = kind
    if found is not None:
        node.state, node.series, node.since = found.state, found.series, found.since
        node.incidents = sorted(set(found.incidents))


def _roll_up(node: Node) -> int:
    node.worst = max([node.state, *(_roll_up(child) for child in node.children.values())])
    return node.worst
