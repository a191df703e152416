"""The interface to a dump's writer: entries of calls, variables, and tensors of a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class DumpedTensorPlace:
    """A parameter, gradient or state tensor, and its place in `dump.json`: entry, group and key."""

    entry: str
    group: str
    key: str
    tensor: Any

    @property
    def stem(self) -> str:
        """The name of the tensor's file without suffix, in msprobe 26.2's form."""
        return f"{self.entry}.parameters.{self.key}" if self.group == "parameters" else f"{self.entry}.{self.key}"


class EntryWriter(Protocol):
    """Writes the entries of one step of one rank, each as soon as it is complete."""

    def entry(self, name: str, content: dict[str, Any]) -> None:
        """Write the description of a call."""

    def parent(self, name: str, parent: str | None) -> None:
        """Write a call's parent in the tree of calls, when the call begins."""

    def stack(self, name: str, number: int, lines: Sequence[str]) -> None:
        """Write the stack of a call; equal numbers are equal stacks."""

    def tensor_path(self, file_name: str) -> Path:
        """Return the path for a tensor's file."""


class VariableWriter(Protocol):
    """Writes variables that a script saves, and the gradients at them."""

    def entry(self, name: str, content: Any) -> None:
        """Write a variable."""

    def tensor_path(self, file_name: str) -> Path:
        """Return the path for a tensor's file."""

    def close(self) -> None:
        """Finish the file."""
