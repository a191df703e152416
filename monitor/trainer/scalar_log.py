"""Scalars that the training loop logs: checked, and told apart within a step."""

from collections import Counter
from typing import Any, Final

import numpy as np

from trainsentry.collectors.backend import ModelWatch
from trainsentry.collectors.guard import Guard

MAX_LOGS: Final = 64
"""Values of one name kept within a step, one a micro-step; more replace the last."""


class ScalarLog:
    """Hands logged scalars to the collectors; a value that is none costs itself and nothing else."""

    def __init__(self, watch: ModelWatch, guard: Guard) -> None:
        self.watch = watch
        self.guard = guard
        self._counts: Counter[str] = Counter()

    def take(self, scalars: dict[str, Any]) -> None:
        """Take values by name; the second value of a name within a step belongs to the second micro-step.

        Raises:
            TypeError: when the guard is strict and a value is no scalar.

        """
        for name, value in scalars.items():
            if not _is_scalar(value):
                error = TypeError(f"log({name}=…): got {_shown(value)}, allowed: a number or a tensor of one element")
                if self.guard.strict:
                    raise error
                self.guard.refuse("log", error)
                continue
            self.watch.log(name, value, min(self._counts[name], MAX_LOGS - 1))
            self._counts[name] += 1

    def end_step(self) -> None:
        """Begin to count anew."""
        self._counts.clear()


def _is_scalar(value: Any) -> bool:
    numel = getattr(value, "numel", None)
    if callable(numel):
        return bool(numel() == 1)
    return isinstance(value, (int, float, np.number, np.bool_)) or (isinstance(value, np.ndarray) and value.size == 1)


def _shown(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"{type(value).__name__} of shape {tuple(shape)}" if shape is not None else repr(value)[:80]
