"""Seeds every source of random numbers, so that two runs draw the same."""

import os
import random
from typing import Final

import numpy as np
import torch
from torch import nn

MAX_SEED: Final = 2**32 - 1
"""The highest seed that NumPy takes."""

DROPOUTS: Final = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
)


def seed_all(seed: int = 1234, mode: bool = False, rm_dropout: bool = False) -> None:
    """Seed random, NumPy and torch on every device; with `mode` choose deterministic algorithms.

    With `rm_dropout` dropout passes its input on unchanged, as functions and as modules, for the rest of the process.
    PYTHONHASHSEED is set for processes that are started from here on.

    Raises:
        ValueError: for a seed that is not a whole number from 0 to 2^32 − 1.
        TypeError: when `mode` or `rm_dropout` is neither True nor False.

    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed: got {seed!r}; allowed: a whole number from 0 to {MAX_SEED}")
    for name, value in (("mode", mode), ("rm_dropout", rm_dropout)):
        if not isinstance(value, bool):
            raise TypeError(f"{name}: got {value!r}; allowed: True or False")
    os.environ["PYTHONHASHSEED"] = str(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - what scripts draw from
    torch.manual_seed(seed)  # every device of torch's own
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
