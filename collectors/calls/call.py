"""One call of a module or an operation."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class Call:
    """A call under way or over.

    `stem` and `number` make its names: `Functional.linear` and 0 for an operation, `Module.fc.Linear` and 0 for a
    module. `sequence` is the number of autograd's next node when it began, `edges` where the gradients of its
    input tensors go in the graph: (node, which of its outputs). `followed` says that its backward
    pass is to be seen, `changed` is the tensor that a
    call without a result changes. `state` belongs to the task that records it.
    """

    stem: str
    number: int
    is_module: bool
    parent: "Call | None" = None
    scope: str | None = None
    wanted: bool = True
    sequence: int = 0
    edges: list[tuple[Any, int] | None] = field(default_factory=list)
    followed: bool = False
    recomputed: bool = False
    changed: Any = None
    state: Any = None

    def name(self, direction: str = "forward") -> str:
        """Return the full name, as msprobe has it."""
        if self.is_module:
            return f"{self.stem}.{direction}.{self.number}"
        return f"{self.stem}.{self.number}.{direction}"

    def parent_name(self, direction: str = "forward") -> str | None:
        """Return the name of the module, or the phase of training, around the call."""
        return self.parent.name(direction) if self.parent is not None else self.scope

    def is_in(self, parts: Sequence[str], direction: str) -> bool:
        """Whether a part is in the name of the call or of a module around it."""
        call: Call | None = self
        while call is not None:
            name = call.name(direction)
            if any(part in name for part in parts):
                return True
            call = call.parent
        return False
