"""Seeds torch's random numbers, so that two runs draw the same."""

import os
from typing import Final

import torch
from torch import nn

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
    torch.manual_seed(seed)  # seeds every device of torch's own, but no NPU
    npu = getattr(torch, "npu", None)
    if npu is not None and npu.is_available():
        npu.manual_seed_all(seed)
    if mode:
        _choose_deterministic_algorithms()
    if rm_dropout:
        _remove_dropout()


def _choose_deterministic_algorithms() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    for name in ("HCCL_DETERMINISTIC", "LCCL_DETERMINISTIC"):
        os.environ[name] = "true"
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


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
