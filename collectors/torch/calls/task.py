"""What is done with the calls that are followed."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from trainsentry.collectors.calls.call import Call
from trainsentry.collectors.calls.dump_entries import EntryWriter


class CallTask(Protocol):
    """What is done with a call; see `DumpTask`."""

    writer: EntryWriter | None

    def before(self, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A call that is wanted begins."""

    def after(self, call: Call, output: Any, module: nn.Module | None) -> None:
        """It has ended."""

    def gradient_arrived(self, call: Call, place: int, gradient: Tensor) -> Any:
        """The gradient at an output is there; return what is to be kept of it."""

    def gradients(self, call: Call, inputs: Sequence[Any], outputs: Sequence[Tensor | None]) -> None:
        """All are there: what was kept of those at outputs, and those at inputs."""

    def parameter_gradients(self, name: str, gradients: Mapping[str, Tensor]) -> None:
        """Those of a module's parameters are there."""

    def flush(self) -> None:
        """Nothing more will come for now."""

    def forget(self) -> None:
        """Tensors may have changed without a trace."""
