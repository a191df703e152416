"""Sees every operation of torch that is called from Python."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._C import _len_torch_function_stack
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from trainsentry.collectors.guard import Guard

Around = Callable[[str, Any, tuple[Any, ...], Mapping[str, Any]], Any]


class OperationMode(TorchFunctionMode):
    """Hands operations that have a name to `around(name, function, args, kwargs)`, which makes the call.

    Inside the call the mode is off, so that only the outermost operation is seen.
    """

    def __init__(self, guard: Guard, part: str, name_of: Callable[[Any, Any], str | None], around: Around) -> None:
        super().__init__()
        self._guard = guard
        self._part = part
        self._name_of = name_of
        self._around = around

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make the call, and have it seen."""
        if torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        try:
            name = self._name_of(func, sys._getframe(1))
        except Exception as error:  # noqa: BLE001 - no mistake of ours may reach the user's call
            self._guard.report(self._part, error)
            name = None
        if name is None or self._part in self._guard.disabled:
            return func(*args, **(kwargs or {}))
        return self._around(name, func, args, kwargs or {})


def enter_below(mode: TorchFunctionMode) -> None:
    """Enter a mode below those that are entered already, so that each of them is the top one when it is left."""
    above = _take_off(None)
    mode.__enter__()
    _put_back(above)


def leave(mode: TorchFunctionMode) -> None:
    """Leave a mode, wherever it stands among the others; without effect when it is not there."""
    above = _take_off(mode)
    if _len_torch_function_stack() > 0:
        mode.__exit__(None, None, None)
    _put_back(above)


def _take_off(until: TorchFunctionMode | None) -> list[Any]:
    """Take modes off the stack until `until` is on top; return them, the topmost first."""
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
