"""Seeds torch's random numbers, so that two runs draw the same."""

from typing import Final

import torch
from torch import nn

from trainsentry.collectors.torch.device.registry import known_devices

RM_DROPOUT: Final = True
"""The default of `rm_dropout` that msprobe documents for PyTorch."""

DROPOUTS: Final = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
    "feature_dropout",
)
"""Functions of `torch.nn.functional` and `torch`, those of torch also with a trailing underscore."""


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
    for module in (nn.functional, torch):
        for name in (*DROPOUTS, *(f"{name}_" for name in DROPOUTS)):
            if hasattr(module, name):
                setattr(module, name, _pass_on)


def _pass_on(input: torch.Tensor, *_: object, **__: object) -> torch.Tensor:  # noqa: A002 - the name that callers use
    return input
