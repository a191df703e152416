"""Intercepts every torch operation that Python code calls."""

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, Final

import torch
from torch._C import _len_torch_function_stack
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from trainsentry.collectors.calls.call_stacks import is_ours
from trainsentry.collectors.guard import Guard
from trainsentry.collectors.torch.calls.call_arguments import HANDLER, may_change_arguments
from trainsentry.collectors.torch.calls.call_names import CallNames

CallOperation = Callable[[str, Any, tuple[Any, ...], Mapping[str, Any], FrameType | None], Any]


class OperationMode(TorchFunctionMode):
    """Routes operations that have a name through `call_operation(name, function, args, kwargs, frame)`.

    `before_change` is called before an operation without a name that may change tensors.
    `frame` is the caller's. Inside the call the mode is off, so that only the outermost operation is intercepted.
    """

    def __init__(
        self,
        guard: Guard,
        part: str,
        names: CallNames,
        call_operation: CallOperation,
        before_change: Callable[[], None],
    ) -> None:
        super().__init__()
        self._guard = guard
        self._part = part
        self._names = names
        self._call_operation = call_operation
        self._before_change = before_change

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make the call, through `call_operation` if it has a name."""
        if torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        name, frame = self._named(func)
        if name is None or self._part in self._guard.disabled:
            if may_change_arguments(getattr(func, "__name__", "")):
                self._guard.run(self._part, self._before_change)
            return func(*args, **(kwargs or {}))
        return self._call_operation(name, func, args, kwargs or {}, frame)

    def _named(self, function: Any) -> tuple[str | None, FrameType | None]:
        """Return the name of a call, None for one that is not intercepted, and the caller's frame."""
        try:
            if self._names.leaves_out(function):
                return None, None
            frame = caller()
            return (None if _called_by_monitor(frame) else self._names.name_of(function, frame)), frame
        except Exception as error:  # noqa: BLE001 - no exception of the monitor may reach the user's call
            self._guard.report(self._part, error)
            return None, None


def caller() -> FrameType | None:
    """Return the frame that called an operation, skipping the monitor's own modes."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name in _PASSING and is_ours(frame.f_code):
        frame = frame.f_back
    return frame


def _called_by_monitor(frame: FrameType | None) -> bool:
    """Whether the monitor itself makes the call, directly or through one of torch's Python functions."""
    if frame is not None and frame.f_code.co_name == HANDLER and frame.f_back is not None:
        frame = frame.f_back.f_back
    return frame is not None and is_ours(frame.f_code)


_PASSING: Final = frozenset({"__torch_function__", "call_operation"})
"""Functions of the monitor that pass a call on."""


def enter_below(mode: TorchFunctionMode) -> None:
    """Enter a mode below those already entered, so that each of them is on top when it is left."""
    above = _take_off(None)
    # The mode of torch.set_default_device must stay at the bottom.
    bottom = [above.pop()] if above and type(above[-1]).__name__ == "DeviceContext" else []
    _put_back(bottom)
    mode.__enter__()
    _put_back(above)


def leave(mode: TorchFunctionMode) -> None:
    """Leave a mode at any position of the stack; without effect when it is not there."""
    above = _take_off(mode)
    if _len_torch_function_stack() > 0:
        mode.__exit__(None, None, None)
    _put_back(above)


def _take_off(until: TorchFunctionMode | None) -> list[Any]:
    """Pop modes from the stack until `until` is on top; return them, topmost first."""
    taken: list[Any] = []
    while _len_torch_function_stack() > 0:
        mode = _pop_mode()
        if mode is until:
            _push_mode(mode)
            break
        taken.append(mode)
    return taken


def _put_back(modes: list[Any]) -> None:
    for mode in reversed(modes):
        _push_mode(mode)
