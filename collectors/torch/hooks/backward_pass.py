"""Whether a backward pass is running, where in its graph, and what is to be done when it has ended."""

from collections.abc import Callable

import torch


def in_backward() -> bool:
    """Whether the backward pass runs; a forward inside it is a recomputation."""
    return graph_task() != -1


def graph_task() -> int:
    """Return the number of the backward pass that runs, -1 for none; one inside another has its own."""
    return torch._C._current_graph_task_id()  # it has no public name


def node_number() -> int:
    """Return autograd's number of the function of Python's whose backward pass runs, -1 where it is none."""
    current = getattr(torch._C, "_current_autograd_node", None)
    node = None if current is None else current()
    return int(node._sequence_nr()) if isinstance(node, torch.autograd.function.BackwardCFunction) else -1


def next_node_number() -> int:
    """Return the number that autograd will give the next node that this thread makes."""
    return int(getattr(torch.autograd, "_get_sequence_nr")())  # noqa: B009 - it has no public name


def after_backward(function: Callable[[], None]) -> None:
    """Have a function called when the backward pass that is running has ended, after what was asked for before."""
    torch.autograd.Variable._execution_engine.queue_callback(function)
