"""The protocols of what proves an incident: capturing tensors, saving them, and repeating a forward pass."""

from collections.abc import Callable, Collection, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from trainsentry.collectors.calls.dump_entries import DumpedTensorPlace, EntryWriter


class TensorCapture(Protocol):
    """Saves whole tensors of chosen modules, for a targeted dump."""

    @property
    def framework(self) -> str:
        """The framework's name in `dump.json`."""

    def attach(self, modules: Collection[str], writer: EntryWriter, may_save: Callable[[str, Any], bool]) -> None:
        """Describe the modules' calls, and save the tensors that `may_save` accepts."""

    def check_overflow(self, writer: EntryWriter) -> Any:
        """Record every call of the coming step that overflows."""

    def nonfinite_weights(self) -> list[str]:
        """Return the names of the model's parameters that hold NaN or Inf; waits for a device."""

    def model_tensors(self, modules: Collection[str], optimizers: Sequence[Any]) -> Iterator[DumpedTensorPlace]:
        """Yield the current parameters, gradients and optimizer state of modules."""

    def inputs(self, steps_back: int = 0) -> list[DumpedTensorPlace]:
        """Return the model's inputs of the step that was so many steps ago, as far as they are still there."""

    def describe(self, tensor: Any) -> dict[str, Any]:
        """Return a tensor's entry in `dump.json`."""

    def close(self) -> None:
        """Remove every hook."""


class StepAgreement(Enum):
    """How the results of a repeated forward pass compare with the step's own."""

    EQUAL = "equal"
    DIFFERENT = "different"
    NOT_REPEATABLE = "not repeatable"
    NOT_MADE = "not made"


class Replay(Protocol):
    """Runs the last forward pass again."""

    def run(self, modules: Collection[str], writers: Collection[EntryWriter]) -> str:
        """Write the modules' outputs of each run; return "done" or why not."""

    def compare_with_step(self) -> tuple[StepAgreement, str]:
        """Compare what the last `run` gave with what the step computed: how, and what differs or why not compared."""


class TensorFiles(Protocol):
    """Saves tensors to files."""

    @property
    def SUFFIX(self) -> str:  # noqa: N802 - a constant of a module
        """The suffix of the files' names."""

    def save_tensor(self, tensor: Any, path: Path) -> None:
        """Write a tensor to a file."""

    def stored_bytes(self, tensor: Any) -> int:
        """Return the bytes of a tensor's file without its header."""
