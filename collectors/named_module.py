"""A module of a framework with its name."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class NamedModule:
    """A module (or cell) with its clean name and the model chunk (`vpp_stage`) that it belongs to."""

    name: str
    module: Any
    vpp_stage: int
