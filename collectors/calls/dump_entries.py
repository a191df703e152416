"""What a debugger or a targeted dump hands to the writer of a dump."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class DumpedTensorPlace:
    """A tensor that a step holds: its entry in `dump.json`, its group in it, and its key."""

    entry: str
    group: str
    key: str
    tensor: Any

    @property
    def stem(self) -> str:
        """The name of the tensor's file, without the suffix, as msprobe 26.2 names it."""
        return f"{self.entry}.parameters.{self.key}" if self.group == "parameters" else f"{self.entry}.{self.key}"


class EntryWriter(Protocol):
    """Takes the entries of one step of one rank, each as soon as it is complete."""

    def entry(self, name: str, content: dict[str, Any]) -> None:
        """Take what is known of a call."""

    def parent(self, name: str, parent: str | None) -> None:
        """Take a call's place in the tree of calls, when it begins."""

    def stack(self, name: str, number: int, lines: Sequence[str]) -> None:
        """Take where a call came from; equal numbers are equal stacks."""

    def tensor_path(self, file_name: str) -> Path:
        """Return where a tensor's file is to be written."""


class VariableWriter(Protocol):
    """Takes variables that a script hands over, and the gradients at them."""

    def entry(self, name: str, content: Any) -> None:
        """Take a variable."""

    def tensor_path(self, file_name: str) -> Path:
        """Return where a tensor's file is to be written."""

    def close(self) -> None:
        """Nothing more will come."""
