"""Keeps threads apart that add rows: autograd runs the backward pass of each device in a thread of its own."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Final

ADDING: Final = (
    "add",
    "add_shared",
    "add_many",
    "add_parameters",
    "add_pairs",
    "add_scalar",
    "add_numbers",
    "before_write",
    "read_gathered",
    "take",
    "drop",
    "peek",
    "norms",
)
"""The methods of `StepRows` that add rows, read those that wait, complete them, or take them away."""


def keep_threads_apart(rows: Any) -> None:
    """Let one thread at a time into the methods of a step's rows, each of which numbers the rows that it appends.

    A process whose model lies on one device has no need of that, and does not pay for it.
    """
    lock = threading.RLock()
    for name in ADDING:
        setattr(rows, name, partial(_alone, lock, getattr(rows, name)))


def _alone(lock: threading.RLock, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with lock:
        return method(*args, **kwargs)
