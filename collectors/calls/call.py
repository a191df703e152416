"""One call of a module or an operation, and the protocol of a task that records calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from trainsentry.collectors.calls.dump_entries import EntryWriter

PART: Final = "debugger"
"""The guard's name of the debugger, and of the tasks that record for it."""


@dataclass(slots=True, eq=False)
class Call:
    """A call under way or over.

    `stem` and `number` make its names: `Functional.linear` and 0 for an operation, `Module.fc.Linear` and 0 for a
    module. `recorded` says whether the task records it, `traced` whether its backward pass is watched. `sequence` is
    the number of autograd's next node when it began; `edges` lead the gradients of its input tensors: (node, output
    number). `changed` is the tensor that a call without a result changes. `state` belongs to the recording task.
    """

    stem: str
    number: int
    is_module: bool
    parent: "Call | None" = None
    scope: str | None = None
    recorded: bool = True
    sequence: int = 0
    edges: list[tuple[Any, int] | None] = field(default_factory=list)
    traced: bool = False
    recomputed: bool = False
    changed: Any = None
    state: Any = None

    def name(self, direction: str = "forward") -> str:
        """Return the full name in msprobe's form."""
        if self.is_module:
            return f"{self.stem}.{direction}.{self.number}"
        return f"{self.stem}.{self.number}.{direction}"

    def parent_name(self, direction: str = "forward") -> str | None:
        """Return the name of the module, or of the phase of training, that contains the call."""
        return self.parent.name(direction) if self.parent is not None else self.scope

    def is_in(self, parts: Sequence[str], direction: str) -> bool:
        """Whether a part occurs in the name of the call or of a module that contains it."""
        call: Call | None = self
        while call is not None:
            name = call.name(direction)
            if any(part in name for part in parts):
                return True
            call = call.parent
        return False


class CallTask(Protocol):
    """Records calls; tensors are those of a framework."""

    writer: EntryWriter | None

    def before(self, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Take a call's inputs, before it runs."""

    def after(self, call: Call, output: Any, module: Any) -> None:
        """Take a call's outputs, after it has run; `module` is None for an operation."""

    def gradient_arrived(self, call: Call, place: int, gradient: Any) -> Any:
        """Take the gradient at an output; return what `gradients` gets for it."""

    def gradients(self, call: Call, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Take all gradients of a call: at its outputs, as `gradient_arrived` returned them, and at its inputs."""

    def parameter_gradients(self, name: str, gradients: Mapping[str, Any]) -> None:
        """Take the gradients of a module's parameters."""

    def flush(self) -> None:
        """Write what is still kept."""

    def before_change(self, uncounted: Sequence[Any]) -> None:
        """Read what was taken and not yet read: code that may change it is about to run.

        The framework does not count the changes of the tensors `uncounted`, which a collective is about to fill.
        """

    def forget(self) -> None:
        """Forget what is known of tensors: they may have changed unnoticed."""
