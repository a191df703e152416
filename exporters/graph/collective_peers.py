"""Finds the calls of other ranks that a collective or a message of a step belongs to."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

from trainsentry.exporters.graph.call_graph import INPUT, CallGraph, GraphNode

_BOTH: Final = "send_receive"

_MESSAGES: Final = {
    "send": ("recv", "dst", "send"),
    "isend": ("irecv", "dst", "send"),
    "recv": ("send", "src", "receive"),
    "irecv": ("isend", "src", "receive"),
}
"""Of a message: the other side's operation, the argument that names the other rank, and the direction."""

_ONE_SIDED: Final = {
    "broadcast": (("src", "1"), "send"),
    "scatter": (("src",), "send"),
    "gather": (("dst",), "receive"),
    "reduce": (("dst", "1"), "receive"),
}
"""Of a collective with one rank in the middle: the argument that names it, and what that rank does."""

_OPPOSITE: Final = {"send": "receive", "receive": "send"}

_Key = tuple[Any, ...]


def match_collectives(graphs: Sequence[CallGraph]) -> None:
    """Note in each collective and message of the ranks of a step which calls of other ranks it belongs to.

    Ranks run the collectives of a group in one order, so the n-th call of an operation on a group is the n-th on all
    its ranks; and the n-th message to a rank is the n-th that rank receives.
    """
    if len(graphs) < 2:
        return
    calls: dict[_Key, dict[int, GraphNode]] = {}
    for graph in graphs:
        for key, node in _numbered(graph):
            calls.setdefault(key, {})[graph.rank] = node
    for key, by_rank in calls.items():
        if key[0] == "message":
            _match_message(key, by_rank, calls)
        else:
            _match_group(by_rank)


def _numbered(graph: CallGraph) -> Iterable[tuple[_Key, GraphNode]]:
    """Yield the collectives and messages of a rank with what they share with their counterparts."""
    seen: Counter[_Key] = Counter()
    for node in graph.nodes.values():
        if not node.name.startswith("Distributed.") or not node.name.endswith(".forward"):
            continue
        operation = _operation(node)
        if operation in _MESSAGES:
            other = _argument(node, _MESSAGES[operation][1]).get("value")
            key: _Key = ("message", operation, graph.rank, other)
        else:
            key = ("group", operation, _argument(node, "group").get("group_id"))
        if key[-1] is not None:
            seen[key] += 1
            yield (*key, seen[key]), node


def _match_message(key: _Key, by_rank: dict[int, GraphNode], calls: dict[_Key, dict[int, GraphNode]]) -> None:
    _, operation, rank, other, number = key
    answer, _, direction = _MESSAGES[operation]
    peer = calls.get(("message", answer, other, rank, number), {}).get(other)
    if peer is not None:
        by_rank[rank].peers = _peers(direction, {other: peer})


def _match_group(by_rank: dict[int, GraphNode]) -> None:
    for rank, node in by_rank.items():
        others = {r: other for r, other in by_rank.items() if r != rank}
        one_sided = _ONE_SIDED.get(_operation(node))
        if one_sided is None:
            node.peers = _peers(_BOTH, others) if others else {}
            continue
        arguments, direction = one_sided
        middle = next((v for a in arguments if (v := _argument(node, a).get("value")) is not None), None)
        if middle == rank and others:
            node.peers = _peers(direction, others)
        elif middle in others:
            node.peers = _peers(_OPPOSITE[direction], {middle: others[middle]})


def _peers(direction: str, others: dict[int, GraphNode]) -> dict[str, Any]:
    """Return what the plugin reads: the direction, and by rank the other call's overflow or precision and its name."""
    nodes = {}
    for rank, node in sorted(others.items()):
        index = node.overflow if node.overflow is not None else node.precision
        nodes[str(rank)] = ["Nan" if index is None else str(index), node.name]
    return {"communications_type": direction, "nodes_info": nodes}


def _operation(node: GraphNode) -> str:
    return node.name.split(".")[1]


def _argument(node: GraphNode, name: str) -> dict[str, Any]:
    wanted = f"{node.name}.{INPUT}.{name}"
    return next((value.facts for value in node.values if value.name == wanted), {})
