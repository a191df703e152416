"""Whether a backward pass is running, and what is to be done when it has ended."""

from collections.abc import Callable

import torch


def in_backward() -> bool:
    """Whether the backward pass runs; a forward inside it is a recomputation."""
    return torch._C._current_graph_task_id() != -1  # it has no public name


def after_backward(function: Callable[[], None]) -> None:
    """Have a function called when the backward pass that is running has ended, after what was asked for before."""
    torch.autograd.Variable._execution_engine.queue_callback(function)
