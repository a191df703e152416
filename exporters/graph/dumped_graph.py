"""Makes the graph of a debugger's dump: construct.json is its tree, dump.json its values, stack.json its stacks."""

import re
from typing import Final

from trainsentry.exporters.dumps.dump_reader import RankDump
from trainsentry.exporters.files.foreign_files import InputError
from trainsentry.exporters.graph.call_graph import (
    COLLECTION,
    OPERATION,
    ROOT,
    CallGraph,
    backward_of,
    forward_of,
    is_backward,
)
from trainsentry.exporters.graph.dumped_values import values_of

BETWEEN_MODULES: Final = "Apis_Between_Modules"
"""The name of a collection, as msprobe has it."""

_GRADIENTS: Final = re.compile(r"\.parameters_grad(?:\.\d+)?$", re.ASCII)
_MODULES_BACKWARD: Final = re.compile(r"\.backward\.\d{1,9}$", re.ASCII)


def graph_of_dump(dump: RankDump) -> CallGraph:
    """Return the graph of a rank's dump, with the parents, collections and names that msprobe 26.2 gives them.

    Raises:
        InputError: when the dump has no tree.

    """
    parents = dump.parents
    if not parents:
        raise InputError(
            f"{dump.directory}: construct.json is missing or empty, and a graph is drawn from it; "
            "dump at level L0 or mix, or with the task structure"
        )
    graph = CallGraph(dump.step, dump.rank, str(dump.head.get("task", "")), checksums=_has_checksums(dump))
    if graph.task == "tensor":
        graph.data_folder = str((dump.directory / "dump_tensor_data").resolve())
    for call in parents:
        graph.add(call)
    for call in parents:
        parent = _parent(call, parents) or ROOT
        parent = ROOT if parent == call else parent
        if parent not in graph.nodes:
            graph.add(parent)
            graph.put_below(parent, ROOT)
        graph.put_below(call, parent)
    _break_circles(graph)
    _collect_operations(graph)
    _add_gradients(graph, dump)
    _fill(graph, dump)
    return graph


def _has_checksums(dump: RankDump) -> bool:
    """Return whether the tensors have checksums; the first hundred calls tell."""
    calls = list(dump.calls)[:100]
    return any("md5" in tensor.facts for call in calls for tensor in dump.tensors(call))


def _parent(call: str, parents: dict[str, str | None]) -> str | None:
    """Return a call's parent; a backward pass without one, or with one of another module, has its forward pass's.

    In-place operations hide the end of a module's backward pass, and the next one then appears to lie in it.
    """
    parent = parents[call]
    twin = forward_of(call)
    if not is_backward(call) or (parent and not _is_of_another_module(call, parent)):
        return parent
    if parent and twin not in parents:
        return parent
    above = parents.get(twin)
    if not above:
        return None
    return backward_of(above) if backward_of(above) in parents else parent


def _is_of_another_module(call: str, parent: str) -> bool:
    """Return whether the parent of a module's backward pass is another module than the name says."""
    parts, above = call.split("."), parent.split(".")
    if not _MODULES_BACKWARD.search(call) or len(parts) < 5 or len(above) < 4:
        return False
    return parts[:-4] != above[:-3]


def _break_circles(graph: CallGraph) -> None:
    """Put one node of each circle of parents below the root; a file that others wrote may have any parents."""
    reached = {ROOT}
    for name in graph.nodes:
        way: set[str] = set()
        at = name
        while at not in reached:
            reached.add(at)
            way.add(at)
            at = graph.nodes[at].parent
        if at in way:
            graph.nodes[graph.nodes[at].parent].children.remove(at)
            graph.nodes[at].parent = ROOT
            graph.root.children.append(at)


def _collect_operations(graph: CallGraph) -> None:
    """Gather neighbouring operations below the root, of which there may be very many, in collections."""
    children, run, count = graph.root.children, list[str](), 0
    graph.root.children = []
    for name in [*children, ROOT]:
        if name != ROOT and graph.nodes[name].kind == OPERATION:
            run.append(name)
            continue
        if len(run) > 1:
            collection = graph.add(f"{BETWEEN_MODULES}.{count}", COLLECTION)
            collection.parent, collection.children = ROOT, run
            for operation in run:
                graph.nodes[operation].parent = collection.name
            graph.root.children.append(collection.name)
            count += 1
        else:
            graph.root.children += run
        run = []
        graph.root.children += [name] if name != ROOT else []


def _add_gradients(graph: CallGraph, dump: RankDump) -> None:
    """Add the gradients of a module's parameters, which are no calls, below its last backward pass."""
    last: dict[str, int] = {}
    for name in graph.nodes:
        module, word, number = [*name.rsplit(".", 2), "", ""][:3]
        if word == "backward" and number.isascii() and number.isdigit() and len(number) < 10:
            last[module] = max(last.get(module, 0), int(number))
    for call in dump.calls:
        found = _GRADIENTS.search(call)
        if found is not None and call not in graph.nodes:
            module = call[: found.start()]
            graph.add(call)
            graph.put_below(call, f"{module}.backward.{last[module]}" if module in last else ROOT)


def _fill(graph: CallGraph, dump: RankDump) -> None:
    """Give the nodes their values, stacks and micro-steps; a backward pass has the stack of its forward pass."""
    for name, node in graph.nodes.items():
        node.values = values_of(name, dump.calls.get(name))
        node.stack = dump.stacks.get(name, [])
        if not node.stack and is_backward(name):
            first = re.sub(r"\.\d{1,9}$", ".0", forward_of(name))  # a module's calls have one stack
            node.stack = dump.stacks.get(first, dump.stacks.get(forward_of(name), []))
        node.micro_step = dump.micro_steps.get(name)
