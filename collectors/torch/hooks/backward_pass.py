"""Tells whether a backward pass is running and at which node, and runs functions after its end."""

from collections.abc import Callable
from typing import Any

import torch

graph_task: Callable[[], int] = torch._C._current_graph_task_id  # it has no public name
"""Returns the number of the running backward pass, -1 for none; a nested one has its own number."""


def in_backward() -> bool:
    """Whether a backward pass is running; a forward pass inside it is a recomputation."""
    return graph_task() != -1


def running_node() -> Any:
    """Return autograd's node that is running backward, in its hooks too; None for none."""
    current = getattr(torch._C, "_current_autograd_node", None)
    return None if current is None else current()


def node_number() -> int:
    """Return the sequence number of the Python autograd function that is running backward, -1 for none."""
    node = running_node()
    return int(node._sequence_nr()) if isinstance(node, torch.autograd.function.BackwardCFunction) else -1


def next_node_number() -> int:
    """Return the sequence number of the next autograd node that this thread will make."""
    return int(getattr(torch.autograd, "_get_sequence_nr")())  # noqa: B009 - it has no public name


def after_backward(function: Callable[[], None]) -> None:
    """Run a function after the running backward pass has ended; functions run in the order of these calls."""
    torch.autograd.Variable._execution_engine.queue_callback(function)
