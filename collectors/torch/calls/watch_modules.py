"""Sees the calls of chosen modules."""

import threading
from collections.abc import Sequence
from typing import Any

import torch

from trainsentry.collectors.guard import InertWhenCopied
from trainsentry.collectors.shared.model_graph import NamedModule


class ModuleCallHooks:
    """Hooks before and after the forward passes of modules; `close` removes them."""

    def __init__(self, watcher: Any, modules: Sequence[NamedModule]) -> None:
        self._handles: list[Any] = []
        for named in modules:
            if isinstance(named.module, torch.jit.ScriptModule):
                continue  # it takes no such hooks
            try:
                self._hang_on(named.module, _Pair(watcher, stem_of(named)))
            except Exception:
                self.close()
                raise

    def _hang_on(self, module: Any, pair: "_Pair") -> None:
        before, after = _Before(pair), _After(pair)
        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def stem_of(named: NamedModule) -> str:
    """Return what a module's calls are named after."""
    kind = type(named.module).__name__
    return f"Module.{named.name}.{kind}" if named.name else f"Module.{kind}"


class _Pair:
    """What the two hooks of a module share: the calls under way, the innermost last."""

    def __init__(self, watcher: Any, stem: str) -> None:
        self.watcher = watcher
        self.stem = stem
        self._threads = threading.local()

    @property
    def calls(self) -> list[Any]:
        """Those of this thread."""
        found: list[Any] | None = getattr(self._threads, "calls", None)
        if found is None:
            found = self._threads.calls = []
        return found


class _Before(InertWhenCopied):
    __slots__ = ("pair",)

    def __init__(self, pair: _Pair) -> None:
        self.pair = pair

    def __call__(self, module: Any, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        watcher = self.pair.watcher
        with torch._C.DisableTorchFunction():
            self.pair.calls.append(watcher.guard.run(watcher.part, watcher.begin, self.pair.stem, True, args, kwargs))


class _After(InertWhenCopied):
    __slots__ = ("pair",)

    def __init__(self, pair: _Pair) -> None:
        self.pair = pair

    def __call__(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not self.pair.calls:
            return
        watcher, call = self.pair.watcher, self.pair.calls.pop()
        if call is not None:
            with torch._C.DisableTorchFunction():
                watcher.guard.run(watcher.part, watcher.end, call, output, module)
