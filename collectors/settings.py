"""The collectors' settings as plain data, made from the user's configuration."""

from dataclasses import dataclass, field
from typing import Final

GRADIENTS: Final = "gradients"
PARAMETERS: Final = "parameters"
OPTIMIZER_STATE: Final = "optimizer_state"
UPDATES: Final = "updates"
ACTIVATIONS: Final = "activations"
COMMUNICATION: Final = "communication"
PARTS: Final = (GRADIENTS, PARAMETERS, OPTIMIZER_STATE, UPDATES, ACTIVATIONS)
"""The parts of a step that can be collected from a model, by their names in the configuration."""

LARGEST_INPUT: Final = 2**16
"""Elements of the model's input that are read at every step, 0.1 ms of a core; of a larger input its first samples."""

READ_TOGETHER: Final = 64
"""Activations that an accelerator reads in one launch: a launch costs ten times as much as reading a small tensor."""

READ_TOGETHER_BYTES: Final = 256 * 2**20
"""Bytes of memory that activations keep in use while they wait: 0.2 % of a device of 139 GB, read in 0.1 ms."""


@dataclass(frozen=True)
class CollectSettings:
    """Targets of each part (shell-style patterns), and how the parts are read.

    `inside_graphs` reads activations inside compiled graphs even where that may change the last bits of results.
    Elements with |x| <= `eps` count as zeros. `call_sites` are patterns over the source lines whose collectives are
    recorded; `reducer` also records the collectives that DistributedDataParallel calls in C++. On an accelerator,
    `read_together` activations wait to be read in one launch, or fewer if they hold `read_together_bytes` of memory.
    `after_update` also reads weights after the update; `alignment` compares the directions of gradients and first
    moments.
    `recompute` computes one module's call and its gradients again in each step that samples activations, and with
    `backward` compares inner products in others. `buffers` also reads modules' buffers where it reads weights.
    `operations` compares what a forward pass computes with the passes before, in each step that samples activations.
    `inputs` also reads the model's own inputs in the steps that sample no activations. `histograms` counts the values
    of each tensor that is read.
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
    read_together: int = READ_TOGETHER
    read_together_bytes: int = READ_TOGETHER_BYTES
    after_update: bool = False
    alignment: bool = False
    inputs: bool = True
    buffers: bool = True
    recompute: bool = True
    operations: bool = True
    histograms: bool = False


Plan = frozenset[str]
"""The parts to collect at one step."""
