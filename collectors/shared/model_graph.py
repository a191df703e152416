"""Describes the model as a graph: modules in execution order, the edges between them, and their parameters."""

import weakref
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class NamedModule:
    """A module (or cell), its name in the user's model, and the number of its model chunk (`vpp_stage`)."""

    name: str
    module: Any
    vpp_stage: int


class DataFlow:
    """Learns the edges between modules from the tensors that hooks see in the first sampled step.

    The steps after it add nothing and cost nothing.
    """

    def __init__(self) -> None:
        self.order: list[str] = []
        self.edges: dict[tuple[str, str], None] = {}
        self.passes = 0
        self.seen: set[str] = set()
        self._is_open = False
        self._producers: dict[int, tuple[weakref.ref[Any], str]] = {}

    def begin(self) -> None:
        """Note the start of a sampled step; one that starts again, as a resume does, counts once."""
        self.passes += not self._is_open
        self._is_open = True
        self._producers.clear()

    def end(self) -> None:
        """Note the end of a step."""
        self._is_open = False

    def entered(self, module: str) -> None:
        """Note that `module` runs."""
        if self.passes <= 1 and module not in self.seen:
            self.seen.add(module)
            self.order.append(module)

    def consumed(self, module: str, tensor: Any) -> None:
        """Note that `module` takes `tensor`."""
        if self.passes > 1:
            return
        producer = self._producers.get(id(tensor))
        if producer is not None and producer[0]() is tensor and producer[1] != module:
            self.edges[producer[1], module] = None

    def is_produced(self, tensor: Any) -> bool:
        """Whether a module has returned `tensor`, in the first sampled step."""
        producer = self._producers.get(id(tensor))
        return producer is not None and producer[0]() is tensor

    def produced(self, module: str, tensor: Any) -> None:
        """Note that `module` returns `tensor`; the outermost module that returns it counts as its producer."""
        if self.passes <= 1:
            self._producers[id(tensor)] = (weakref.ref(tensor), module)


def describe(
    names: Any, flow: DataFlow, process_groups: list[dict[str, Any]], *, data_parallel: bool = False
) -> dict[str, Any]:
    """Return the content of `graph.json`; `names` are those of the watched model.

    `data_parallel`: each rank trains on its own data. Modules are in execution order after the first sampled pass,
    before it in registration order.
    """
    ran = {name: i for i, name in enumerate(flow.order)}
    ordered = sorted(names.modules, key=lambda m: ran.get(m.name, len(ran)))  # stable: modules not run stay in order
    return {
        "order": "execution" if flow.order else "registration",
        "modules": [
            {
                "name": m.name,
                "type": type(m.module).__name__,
                "parent": _parent(m.name),
                "vpp_stage": m.vpp_stage,
            }
            for m in ordered
        ],
        "edges": [list(edge) for edge in flow.edges],
        "parameters": {p.name: p.module for p in names.parameters},
        "process_groups": process_groups,
        "data_parallel": data_parallel,
    }


def _parent(name: str) -> str | None:
    return name.rpartition(".")[0] if name else None
