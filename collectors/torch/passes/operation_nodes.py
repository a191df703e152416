"""Nodes of autograd: the one of a module's last operation, and what is known of it."""

from typing import Any, Final

import torch
from torch import Tensor

RESHAPED: Final = ("View", "UnsafeView", "Squeeze", "ReshapeAlias")
"""How the names of autograd's nodes begin that only give the output of the operation before them another shape."""

MOST_RESHAPED: Final = 2
"""Such nodes behind an operation: a module of torch.nn makes one."""

TELLS_DEFAULT_HOOKS: Final = hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
"""Whether this torch tells of hooks of saved tensors, as a checkpoint's, which drops them."""


def operation_of(output: Tensor, before: Any = None) -> Any:
    """Return the node of a module's last operation, None where there is none.

    A module that has given its input back has none of its own: `before` is the node of that input.
    """
    node: Any = output.grad_fn
    for _ in range(MOST_RESHAPED):
        if node is None or node is before or is_python_function(node) or not node.name().startswith(RESHAPED):
            break
        node = node.next_functions[0][0]
    return None if node is before else node


def is_python_function(node: Any) -> bool:
    """Whether a node is of a `torch.autograd.Function`, which may have any name and any effect."""
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def may_be_hooked() -> bool:
    """Whether what nodes save now may pass hooks, such as a checkpoint's."""
    return not TELLS_DEFAULT_HOOKS or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
