"""Seeds every random number generator of the frameworks in use."""

import os
import random
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Final

import numpy as np

from trainsentry.collectors.shared.adapted_torch import adapted_torch

MAX_SEED: Final = 2**32 - 1
"""The highest seed that NumPy accepts."""


def seed_all(seed: int = 1234, mode: bool = False, rm_dropout: bool | None = None) -> None:
    """Seed random, NumPy, and the imported frameworks on every device; with `mode`, use deterministic algorithms.

    With `rm_dropout`, dropout functions and modules return their input for the rest of the process; None is the default
    that msprobe documents: True for PyTorch, False for MindSpore. PYTHONHASHSEED is set for processes started later.

    Raises:
        ValueError: for a seed that is not an integer from 0 to 2^32 − 1.
        TypeError: when `mode` or `rm_dropout` is not a bool (`rm_dropout` may be None).

    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed: got {seed!r}; allowed: a whole number from 0 to {MAX_SEED}")
    for name, value in (("mode", mode), ("rm_dropout", rm_dropout)):
        if not isinstance(value, bool) and not (name == "rm_dropout" and value is None):
            raise TypeError(f"{name}: got {value!r}; allowed: True or False")
    os.environ["PYTHONHASHSEED"] = str(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - scripts draw from the global generator
    if "torch" not in sys.modules and "mindspore" not in sys.modules:  # called before the framework is imported
        import_module(next((name for name in ("torch", "mindspore") if find_spec(name) is not None), "random"))
    if "torch" in sys.modules and adapted_torch() is None:
        from trainsentry.collectors.torch import seeding

        seeding.seed_framework(seed, mode, seeding.RM_DROPOUT if rm_dropout is None else rm_dropout)
    if "mindspore" in sys.modules:
        from trainsentry.collectors.mindspore import seeding as seeding_of_mindspore

        asked = seeding_of_mindspore.RM_DROPOUT if rm_dropout is None else rm_dropout
        seeding_of_mindspore.seed_framework(seed, mode, asked)
