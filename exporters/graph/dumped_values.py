"""The values of a dumped call: tensors, and the numbers, sizes and groups beside them."""

from collections.abc import Iterator
from typing import Any, Final

from trainsentry.exporters.files.foreign_fields import Kind, checked, sizes, statistic, text
from trainsentry.exporters.graph.call_graph import GRADIENTS, INPUT, OUTPUT, PARAMETERS, NodeValue

STATISTICS: Final = ("Max", "Min", "Mean", "Norm")

_PARTS: Final = (
    ("input_args", INPUT),
    ("input_kwargs", INPUT),
    ("input", INPUT),
    ("output", OUTPUT),
    ("parameters", PARAMETERS),
)
"""Members of an entry in msprobe's order, and the part of the node that they are."""

_TENSOR: Final[dict[str, Kind]] = {
    **dict.fromkeys(("type", "dtype", "md5", "data_name"), text),
    **dict.fromkeys(STATISTICS, statistic),
    "shape": sizes,
    "requires_grad": lambda value: value if isinstance(value, bool) else None,
}
_GROUP: Final[dict[str, Kind]] = {
    **dict.fromkeys(("type", "group_id"), text),
    "group_ranks": lambda value: value if isinstance(value, list) else None,
}
_MESSAGE: Final[dict[str, Kind]] = {
    **dict.fromkeys(("op", "group_id"), text),
    "peer": lambda value: value if isinstance(value, int) else None,
}


def values_of(call: str, entry: Any) -> list[NodeValue]:
    """Return the values of a call's entry in dump.json, in its order."""
    if not isinstance(entry, dict):
        return []
    if ".parameters_grad" in call and GRADIENTS in call.split(".")[-2:]:
        found = ((name, _leaves(item, f"{call}.{name}", numbered=False)) for name, item in entry.items())
        return [NodeValue(name, GRADIENTS, facts) for _, leaves in found for name, facts in leaves]
    values = []
    for member, part in _PARTS:
        if member in entry:
            values += [NodeValue(name, part, facts) for name, facts in _leaves(entry[member], f"{call}.{part}")]
    return values


def _leaves(content: Any, name: str, *, numbered: bool = True) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and facts of the values in a nested entry; None has no facts."""
    if content is None:
        yield name, {}
    elif isinstance(content, list):
        for i, item in enumerate(content):
            yield from _leaves(item, f"{name}.{i}" if numbered else name, numbered=numbered)
    elif isinstance(content, dict):
        if content.get("class_type") == "torch.distributed.P2POp":
            yield name, _facts(content.get("tensor") or {}) | checked(content, _MESSAGE)
        elif isinstance(content.get("type"), str):
            yield name, _facts(content)
        else:
            for key, item in content.items():
                yield from _leaves(item, f"{name}.{key}", numbered=numbered)


def _facts(found: Any) -> dict[str, Any]:
    """Return what is known of a value; a number that is no tensor is its own statistics."""
    if not isinstance(found, dict):
        return {}
    if found.get("dtype"):
        return checked(found, _TENSOR)
    kind, value = str(found.get("type")), found.get("value")
    if kind == "torch.ProcessGroup":
        facts = checked(found, _GROUP)
        return {**facts, "dtype": kind, "shape": [], **dict.fromkeys(STATISTICS, str(facts.get("group_ranks")))}
    if kind in {"torch.Size", "slice"}:
        return {"type": kind, "value": str(value), "dtype": kind, "shape": str(value)}
    plain = value if isinstance(value, (bool, int, float, str)) or value is None else str(value)
    facts = {"type": kind, "value": plain, "dtype": f"<class {type(value).__name__}>", "shape": []}
    return {**facts, **dict.fromkeys(STATISTICS, plain)}
