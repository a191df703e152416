"""What to collect, as plain data: made from the user's configuration, read by the collectors."""

from dataclasses import dataclass, field
from typing import Final

GRADIENTS: Final = "gradients"
PARAMETERS: Final = "parameters"
OPTIMIZER_STATE: Final = "optimizer_state"
UPDATES: Final = "updates"
ACTIVATIONS: Final = "activations"
COMMUNICATION: Final = "communication"
PARTS: Final = (GRADIENTS, PARAMETERS, OPTIMIZER_STATE, UPDATES, ACTIVATIONS)
"""The parts of a step that can be collected of a model, as the configuration names them."""


@dataclass(frozen=True)
class CollectSettings:
    """Targets of each part (shell-style patterns), and how the parts are read.

    `inside_graphs` asks for activations inside compiled graphs also where reading them may change the last bits of
    results. `eps` is the bound of zeros; `call_sites` are patterns over the places in the code whose communication is
    recorded, `reducer` asks for what DistributedDataParallel calls in C++ too.
    """

    targets: dict[str, list[str]] = field(default_factory=lambda: {part: ["*"] for part in PARTS})
    forward: bool = True
    backward: bool = True
    inside_graphs: bool = False
    before_reduction: bool = False
    per_micro_step: bool = False
    eps: float = 0.0
    call_sites: tuple[str, ...] = ("*",)
    reducer: bool = False


Plan = frozenset[str]
"""The parts that are collected at one step."""
