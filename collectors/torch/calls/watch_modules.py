"""Hooks the calls of chosen modules for the debugger's call watcher."""

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from trainsentry.collectors.guard import InertWhenCopied
from trainsentry.collectors.shared.model_graph import NamedModule
from trainsentry.collectors.torch.hooks.repeated_calls import REPEATABLE, computes_plainly


class ModuleCallHooks:
    """Registers hooks before and after the forward passes of modules; `close` removes them."""

    def __init__(self, watcher: Any, modules: Sequence[NamedModule]) -> None:
        self._handles: list[Any] = []
        for named in modules:
            if isinstance(named.module, torch.jit.ScriptModule):
                continue  # it accepts no such hooks
            try:
                self._hook(named.module, _CallsUnderWay(watcher, stem_of(named)))
            except Exception:
                self.close()
                raise

    def _hook(self, module: Any, calls: "_CallsUnderWay") -> None:
        before, after = _Before(calls), _After(calls)
        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def stem_of(named: NamedModule) -> str:
    """Return the stem of the names of a module's calls."""
    kind = type(named.module).__name__
    return f"Module.{named.name}.{kind}" if named.name else f"Module.{kind}"


def changes_nothing(module: nn.Module) -> bool:
    """Whether a call of a module only computes: one of torch's own, without parts, and with no hooks but the watcher's.

    The tensors that wait to be read need not be read before it.
    """
    kind = type(module)
    return (
        kind in REPEATABLE
        and kind.forward.__module__ == kind.__module__  # no patch of the class
        and not getattr(module, "inplace", False)
        and computes_plainly(module)
        and len(module._forward_pre_hooks) == len(module._forward_hooks) == 1
        and not (_global_forward_pre_hooks or _global_forward_hooks)
    )


class _CallsUnderWay:
    """A module's calls under way, innermost last, shared by its two hooks."""

    def __init__(self, watcher: Any, stem: str) -> None:
        self.watcher = watcher
        self.stem = stem
        self._threads = threading.local()

    @property
    def here(self) -> list[Any]:
        """The calls of this thread."""
        found: list[Any] | None = getattr(self._threads, "calls", None)
        if found is None:
            found = self._threads.calls = []
        return found


class _Before(InertWhenCopied):
    __slots__ = ("calls",)

    def __init__(self, calls: _CallsUnderWay) -> None:
        self.calls = calls

    def __call__(self, module: Any, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        watcher = self.calls.watcher
        with torch._C.DisableTorchFunction():
            call = watcher.guard.run(watcher.part, watcher.begin, self.calls.stem, module, args, kwargs)
            self.calls.here.append(call)


class _After(InertWhenCopied):
    __slots__ = ("calls",)

    def __init__(self, calls: _CallsUnderWay) -> None:
        self.calls = calls

    def __call__(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not self.calls.here:
            return
        watcher, call = self.calls.watcher, self.calls.here.pop()
        with torch._C.DisableTorchFunction():
            watcher.finish(call, output, module)
