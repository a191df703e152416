"""What the plugin draws besides nodes: colours of precision, comparison modes, and values as text."""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from trainsentry.exporters.graph.call_graph import OUTPUT, CallGraph, GraphNode, NodeValue
from trainsentry.exporters.short_text import shorten

SUMMARY, CHECKSUMS, TENSORS, STRUCTURE = "summary", "md5", "all", "structure"
"""What two graphs are compared by, in msprobe's words (`task`)."""

_COLOURS: Final = (
    ("#FFFCF3", [0, 0.3], "pass", "the values agree"),
    ("#FFDC7F", [0.3, 0.6], "warning", "the results differ more than the inputs explain"),
    ("#FF704D", [0.6, 1], "error", "the results differ although the inputs agree, or dtype, shape or a number differs"),
)
"""msprobe's colours, the ranges of precision that have them, and the plugin's word for them."""

_UNMATCHED: Final = {
    "#C7C7C7": {"value": [], "description": "only one graph has it", "accuracy_level": "unmatched node"}
}

_TIPS: Final = {
    SUMMARY: ("Max diff", "Min diff", "Mean diff", "L2norm diff"),
    TENSORS: (
        "Cosine",
        "EucDist",
        "MaxAbsErr",
        "MaxRelativeErr",
        "One Thousandth Err Ratio",
        "Five Thousandths Err Ratio",
    ),
    CHECKSUMS: ("md5",),
}

_FIRST: Final = ("type", "dtype", "shape", "Max", "Min", "Mean", "Norm", "requires_grad", "data_name")
"""The order in which the members of a value are shown."""

MAX_TEXT: Final = 2000
"""Characters of a member at most."""


@dataclass(frozen=True)
class GraphPair:
    """A graph and the one that it is compared with, the number of their micro-steps, and what was compared."""

    graph: CallGraph
    other: CallGraph | None = None
    micro_steps: int = 1
    mode: str = ""

    @property
    def sides(self) -> list[tuple[str, CallGraph]]:
        """The graphs with the names that the plugin has for them."""
        return [("NPU", self.graph), *([("Bench", self.other)] if self.other is not None else [])]


@dataclass
class Legend:
    """What holds for all pairs of a file: their steps and ranks, micro-steps, mode, and if overflows are marked."""

    marked: bool
    mode: str = ""
    micro_steps: int = 1
    steps: set[int] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)
    compared: bool = False
    nodes: int = 0
    precisions: Counter[float | None] = field(default_factory=Counter)
    unmatched: int = 0

    def take(self, pair: GraphPair) -> None:
        """Add a pair."""
        self.mode = self.mode or pair.mode
        self.micro_steps = max(self.micro_steps, pair.micro_steps)
        self.steps.add(pair.graph.step)
        self.ranks.add(pair.graph.rank)
        self.compared |= pair.other is not None
        self.marked |= any(node.overflow for _, graph in pair.sides for node in graph.nodes.values())
        self.nodes += sum(len(graph.nodes) for _, graph in pair.sides)
        self.precisions.update(node.precision for node in pair.graph.nodes.values() if node.path)
        self.unmatched += sum(not node.path for _, graph in pair.sides for node in graph.nodes.values())

    @property
    def colours(self) -> dict[str, Any] | None:
        """The colours of a comparison; None without one."""
        if not self.compared:
            return None
        by_range = {c: {"value": v, "description": d, "accuracy_level": w} for c, v, w, d in _COLOURS}
        return by_range | _UNMATCHED

    @property
    def tips(self) -> dict[str, str] | None:
        """What the columns of a comparison mean; None without one."""
        return dict.fromkeys(_TIPS.get(self.mode, ()), "A compared with B") if self.compared else None


def inputs_and_outputs(node: GraphNode, *, checksums: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a node's values as the plugin shows them: inputs, with parameters and gradients, and outputs."""
    outputs = node.of_part(OUTPUT)
    inputs = [value for value in node.values if value.part != OUTPUT]
    return _texts_of(inputs, checksums=checksums), _texts_of(outputs, checksums=checksums)


def _texts_of(values: list[NodeValue], *, checksums: bool = False) -> dict[str, dict[str, str]]:
    """Return the members of values as text by the value's name, as the plugin shows them."""
    return {value.name: _members(value, checksums=checksums) for value in values}


def _members(value: NodeValue, *, checksums: bool) -> dict[str, str]:
    facts = value.facts
    if not facts:
        return {"value": "null"} | {key: member_text(item) for key, item in value.figures.items()}
    if facts.get("type") == "torch.ProcessGroup":
        facts = {key: item for key, item in facts.items() if key in {"type", "group_ranks", "group_id"}}
    elif "type" in facts and "Max" not in facts and "value" not in facts:  # of a dump of the structure alone
        pass
    else:
        facts = {**dict.fromkeys(("Max", "Min", "Mean", "Norm", "requires_grad")), **facts}
        facts.setdefault("data_name", "-1")
    left_out = () if checksums else ("md5",)
    order = [*(key for key in _FIRST if key in facts), *(key for key in facts if key not in _FIRST)]
    shown = {key: member_text(facts[key]) for key in order if key not in left_out}
    return shown | {key: member_text(item) for key, item in value.figures.items()}


def member_text(value: Any) -> str:
    """Return a member as text; the plugin cannot read a single quote.

    >>> member_text(None), member_text([2, 3]), member_text("it's")
    ('null', '[2, 3]', 'its')
    """
    if value is None:
        return "null"
    if isinstance(value, float) and math.isnan(value):
        return "nan"
    return shorten(str(value).replace("'", ""), MAX_TEXT)
