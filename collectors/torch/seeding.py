"""Seeds torch's random numbers, so that two runs draw the same."""

from typing import Final

import torch
from torch import nn

from trainsentry.collectors.torch.device.registry import known_devices

DROPOUTS: Final = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
)


def seed_framework(seed: int, mode: bool, rm_dropout: bool) -> None:
    """Seed torch on every device; `mode` chooses deterministic algorithms, `rm_dropout` removes dropout."""
    for device in known_devices():
        device.seed(seed)
    if mode:
        _choose_deterministic_algorithms()
    if rm_dropout:
        _remove_dropout()


def _choose_deterministic_algorithms() -> None:
    torch.use_deterministic_algorithms(True)
    for device in known_devices():
        device.make_deterministic()


def _remove_dropout() -> None:
    for name in DROPOUTS:
        if hasattr(nn.functional, name):
            setattr(nn.functional, name, _pass_on)


def _pass_on(
    input: torch.Tensor,  # noqa: A002 - the name that callers use
    p: float = 0.5,  # noqa: ARG001
    training: bool = True,  # noqa: ARG001
    inplace: bool = False,  # noqa: ARG001
) -> torch.Tensor:
    return input
