"""A tensor that a step holds, and where it stands in a dump."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Piece:
    """A tensor that a step holds: its entry in `dump.json`, its group in it, and its key."""

    entry: str
    group: str
    key: str
    tensor: Any

    @property
    def stem(self) -> str:
        """The name of the tensor's file, without the suffix, as msprobe 26.2 names it."""
        return f"{self.entry}.parameters.{self.key}" if self.group == "parameters" else f"{self.entry}.{self.key}"
