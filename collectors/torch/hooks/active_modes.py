"""Keeps the monitor's operations away from what watches or replaces operations: dispatch and function modes, tracing.

Selective activation checkpointing numbers the operations of a forward pass; a counter of FLOPs adds them up; a mode
of the user's may compute something else. None of them must see an operation that is not the model's.
"""

import threading
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes

_hidden: Final = threading.local()
"""Whether `run_unseen` has hidden modes in this thread."""


def run_unseen(function: Callable[..., Any], *args: Any) -> None:
    """Call `function(*args)` so that no dispatch mode sees its operations."""
    if torch._C._len_torch_dispatch_stack() == 0:
        function(*args)
        return
    _hidden.modes = True
    try:
        with _disable_current_modes():
            function(*args)
    finally:
        _hidden.modes = False


is_tracing: Callable[[], bool] = torch._C._is_tracing
"""Whether `torch.jit.trace` follows the operations of this thread."""


def changes_operations() -> bool:
    """Whether a mode is active under which an operation may do, or mean, something else than it does alone.

    A default device (`torch.set_default_device`) is none: it only tells where new tensors lie.
    """
    if getattr(_hidden, "modes", False) or torch._C._len_torch_dispatch_stack() > 0 or is_tracing():
        return True
    modes = (torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack()))
    return not all(isinstance(mode, DeviceContext) for mode in modes)
