"""A graph of calls: modules and operations as a tree, with the values that they took and gave."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

MODULE, OPERATION, COLLECTION = 0, 1, 9
"""Kinds of a node, as numbered by msprobe's plugin; a collection holds the operations between two modules."""

ROOT: Final = "DefaultModel"
"""The name of the node above all others, as msprobe has it."""

INPUT, PARAMETERS, OUTPUT, GRADIENTS = "input", "parameters", "output", "parameters_grad"
"""The part that a value has in its node."""

MODULE_NAMES: Final = ("Module.", "Cell.", "optimizer", "clip_grad")
"""Beginnings of the names of modules; all other names are operations."""


@dataclass
class NodeValue:
    """A value that a node took or gave: its name, its part in the node, and what was recorded of it.

    `facts` has the members of its entry in dump.json (`dtype`, `shape`, `Max` …), empty for None. `figures` are shown
    behind them, such as a comparison's.
    """

    name: str
    part: str
    facts: dict[str, Any]
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass
class GraphNode:
    """A module or an operation.

    `precision` is 0 (pass), 0.5 (warning), 1 (error) or None (not compared); `overflow` is medium, high, critical or
    None; `path` is where its match lies in the other graph, from the root on; `peers` are the calls of other ranks that
    it communicates with.
    """

    name: str
    kind: int
    parent: str = ""
    children: list[str] = field(default_factory=list)
    values: list[NodeValue] = field(default_factory=list)
    stack: list[str] = field(default_factory=list)
    micro_step: int | None = None
    precision: float | None = None
    overflow: str | None = None
    path: list[str] = field(default_factory=list)
    peers: dict[str, Any] = field(default_factory=dict)

    def of_part(self, part: str) -> list[NodeValue]:
        """Return the values of a part."""
        return [value for value in self.values if value.part == part]


@dataclass
class CallGraph:
    """The nodes of one rank and step by name; `checksums` tells that values are compared by them."""

    step: int
    rank: int
    task: str = ""
    data_folder: str = ""
    checksums: bool = False
    nodes: dict[str, GraphNode] = field(default_factory=lambda: {ROOT: GraphNode(ROOT, MODULE)})

    @property
    def root(self) -> GraphNode:
        """The node above all others."""
        return self.nodes[ROOT]

    def add(self, name: str, kind: int | None = None) -> GraphNode:
        """Return the node of a name, a new one without a parent if there is none."""
        if name not in self.nodes:
            self.nodes[name] = GraphNode(name, kind_of(name) if kind is None else kind)
        return self.nodes[name]

    def put_below(self, name: str, parent: str) -> None:
        """Make a node the last child of another, unless it has a parent."""
        node = self.nodes[name]
        if not node.parent and name not in {ROOT, parent}:
            node.parent = parent
            self.nodes[parent].children.append(name)

    def path_to(self, name: str) -> list[str]:
        """Return the names from the root to a node."""
        found = [name]
        while (parent := self.nodes[found[-1]].parent) and len(found) <= len(self.nodes):
            found.append(parent)
        return found[::-1]

    def in_order(self) -> Iterator[GraphNode]:
        """Yield the nodes, each after its children; nesting may be as deep as it likes."""
        waiting = [(self.root, False)]
        while waiting:
            node, is_done = waiting.pop()
            if is_done:
                yield node
                continue
            waiting.append((node, True))
            waiting += [(self.nodes[child], False) for child in reversed(node.children)]

    def from_the_top(self) -> Iterator[GraphNode]:
        """Yield the nodes level by level."""
        level: Iterable[GraphNode] = [self.root]
        while level := list(level):
            yield from level
            level = [self.nodes[child] for node in level for child in node.children]


def kind_of(name: str) -> int:
    """Return the kind of a node by its name.

    >>> kind_of("Module.fc.Linear.forward.0"), kind_of("Tensor.add.0.forward")
    (0, 1)
    """
    return MODULE if name.startswith((*MODULE_NAMES, ROOT)) else OPERATION


_FORWARD: Final = re.compile(r"\.forward(?=$|\.\d+$)", re.ASCII)
_BACKWARD: Final = re.compile(r"\.backward(?=$|\.\d+$)", re.ASCII)


def is_backward(name: str) -> bool:
    """Return whether a node is a backward pass."""
    return _BACKWARD.search(name) is not None


def forward_of(name: str) -> str:
    """Return the name of a backward pass's forward pass.

    >>> forward_of("Module.backward.Linear.backward.1"), forward_of("Tensor.exp.0.backward")
    ('Module.backward.Linear.forward.1', 'Tensor.exp.0.forward')
    """
    return _BACKWARD.sub(".forward", name)


def backward_of(name: str) -> str:
    """Return the name of a forward pass's backward pass."""
    return _FORWARD.sub(".backward", name)


def number_micro_steps(graph: CallGraph, other: CallGraph | None = None) -> int:
    """Number the micro-steps of a graph and of the one it is compared with; return how many there are.

    A micro-step is a forward pass and its backward pass: the first forward pass of a module after a backward pass
    begins the next one. Operations belong to the micro-step of the module before them. In the other graph, a node has
    the micro-step of its match, and one without a match that of the number at the end of its name.
    """
    count, after_backward = 0, False
    for child in graph.root.children:
        node = graph.nodes[child]
        if node.kind == MODULE and ".forward." in child:
            count += after_backward
            after_backward = False
        elif node.kind == MODULE:
            after_backward = True
        if node.micro_step is None:
            node.micro_step = count
    if other is not None:
        theirs = {
            graph.nodes[c].path[-1]: graph.nodes[c].micro_step for c in graph.root.children if graph.nodes[c].path
        }
        for child in other.root.children:
            last = child.rpartition(".")[2]
            number = int(last) if last.isascii() and last.isdigit() and len(last) < 10 else 0
            other.nodes[child].micro_step = theirs.get(child, number)
        _hand_down(other)
    _hand_down(graph)
    return 1 + max((node.micro_step or 0 for node in graph.nodes.values()), default=0)


def _hand_down(graph: CallGraph) -> None:
    """Give each node without a micro-step that of its parent."""
    for node in graph.from_the_top():
        if node.micro_step is None:
            node.micro_step = graph.nodes[node.parent].micro_step if node.parent else 0
