"""Calls listeners before any torch optimizer of the process steps.

torch iterates over the hooks of all optimizers while they run, so none may be added or removed meanwhile: a monitor
that is made or closed inside one would end the training with an error. So there is one hook, and the listeners are
ours.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

Listener = Callable[[Optimizer], None]


class AnyStepHandle:
    """Ends the calls of a listener."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener

    def remove(self) -> None:
        """End them; the hook itself goes once there is no listener, unless it is running."""
        if self in _listening:
            _listening.remove(self)
        if not _listening and not _running:
            while _hook:
                _hook.pop().remove()


_listening: list[AnyStepHandle] = []
_hook: list[RemovableHandle] = []
_running: list[Optimizer] = []


def before_any_step(listener: Listener) -> AnyStepHandle:
    """Call `listener(optimizer)` before each step of any optimizer, until the returned handle is removed.

    A step that is being compiled is not told of.
    """
    handle = AnyStepHandle(listener)
    _listening.append(handle)
    if not _hook:
        _hook.append(register_optimizer_step_pre_hook(_tell))
    return handle


def _tell(optimizer: Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return
    _running.append(optimizer)
    try:
        for handle in _listening:
            handle.listener(optimizer)
    finally:
        _running.pop()
