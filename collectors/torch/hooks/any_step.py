"""Calls listeners before any torch optimizer of the process steps.

torch iterates over the hooks of all optimizers while they run, so none may be added or removed meanwhile: a monitor
that is made or closed inside one would end the training with an error. So there is one hook, and the listeners are
ours.
"""

import inspect
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

Listener = Callable[[Optimizer], None]

MAKES_STATE: Final = "_init_optim_state"
"""The function of `torch.distributed.checkpoint.state_dict` that makes the state of an optimizer that has none."""


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


def is_inside_own_step(optimizer: Optimizer) -> bool:
    """Whether a hook runs for the `step` of a base class, which the optimizer's own `step` has called.

    Torch wraps `step` of each class whose instances it has made, and a call of the base class's runs the hooks again.
    """
    code = getattr(type(optimizer).step, "__code__", None)  # torch's wrapper, which all classes share
    frame, steps = inspect.currentframe(), 0
    while frame is not None and steps < 2:
        steps += frame.f_code is code and next(iter(frame.f_locals.get("args", ())), None) is optimizer
        frame = frame.f_back
    return steps == 2


def is_of_checkpoint(optimizer: Optimizer) -> bool:
    """Whether a hook runs for the step by which torch's distributed checkpoints make an optimizer's state.

    `get_state_dict` of an optimizer that has no state steps it with gradients and a learning rate of zero. Plain SGD
    never has a state: its callers are looked at in steps alone whose rates may all be zero.
    """
    may_be = not optimizer.state and not any(_is_positive(group.get("lr")) for group in optimizer.param_groups)
    frame = inspect.currentframe() if may_be else None
    while frame is not None and frame.f_code.co_name != MAKES_STATE:
        frame = frame.f_back
    return frame is not None


def _is_positive(rate: Any) -> bool:
    return isinstance(rate, (int, float)) and rate > 0  # a tensor on a device is not read


def after_whole_steps(ended: Callable[[], None]) -> RemovableHandle:
    """Call `ended()` after each step of any optimizer, until the returned handle is removed."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def tell(optimizer: Optimizer, *_: Any) -> None:
        if not is_inside_own_step(optimizer):
            ended()

    return register_optimizer_step_post_hook(tell)


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
    if torch.compiler.is_compiling() or is_of_checkpoint(optimizer):
        return
    _running.append(optimizer)
    try:
        for handle in _listening:
            handle.listener(optimizer)
    finally:
        _running.pop()
