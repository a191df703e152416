"""What a debugger hands to whoever writes a dump."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol


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
