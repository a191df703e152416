"""Patches functions of MindSpore, and restores them during each compiled call.

A compiler would compile the patches, so every function is its original from the start of a compiled call to its end.
Several patches of one function nest; each can be removed on its own, in any order.
"""

import functools
import importlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

Function = Callable[..., Any]
Wrap = Callable[[Function], Function]
"""Returns a wrapper of a function."""

CallCompiled = Callable[[Any, Function, tuple[Any, ...], dict[str, Any]], Any]
"""Makes a compiled call, given the executor, the function that runs it, and the arguments."""

_MISSING: Final = object()


@dataclass
class _Patched:
    """A patched function: its owner's own attribute (missing in a class that inherits it), and its wrappers."""

    owner: Any
    name: str
    own: Any
    function: Function
    wraps: list[Wrap] = field(default_factory=list)
    applied: bool = False

    def apply(self) -> None:
        function: Any = self.function
        for wrap in self.wraps:
            function = wrap(function)
        bound = isinstance(self.own, (staticmethod, classmethod))  # called without an object
        setattr(self.owner, self.name, staticmethod(function) if bound else function)
        self.applied = True

    def restore(self) -> None:
        if not self.applied:
            return
        self.applied = False
        if self.own is _MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.own)


_patched: dict[tuple[int, str], _Patched] = {}
_compiled: list[CallCompiled] = []
_executor: list[tuple[Any, Function]] = []
_lock: Final = threading.RLock()
_running = 0  # compiled calls under way, in all threads


def patch(owner: Any, name: str, wrap: Wrap) -> None:
    """Replace `owner.name` by `wrap` of it; an attribute that cannot be set is left alone.

    Raises:
        RuntimeError: when this version of MindSpore calls compiled functions in an unknown way.

    """
    _watch_executor()
    key = (id(owner), name)
    patched = _patched.get(key)
    if patched is None:
        patched = _Patched(owner, name, vars(owner).get(name, _MISSING), getattr(owner, name))
    with _lock:
        patched.wraps.append(wrap)
        try:
            patched.apply()
        except (AttributeError, TypeError):  # a class that cannot be changed
            patched.wraps.remove(wrap)
            return
        _patched[key] = patched
        if _running:
            patched.restore()


def unpatch(owner: Any, name: str, wrap: Wrap) -> None:
    """Undo `patch`."""
    patched = _patched.get((id(owner), name))
    if patched is None or wrap not in patched.wraps:
        return
    with _lock:
        patched.wraps.remove(wrap)
        patched.restore()
        if not patched.wraps:
            del _patched[id(owner), name]
        elif not _running:
            patched.apply()
    _release_executor()


def watch_compiled(call: CallCompiled) -> None:
    """Route compiled calls through `call`.

    Raises:
        RuntimeError: as `patch`.

    """
    _watch_executor()
    _compiled.append(call)


def unwatch_compiled(call: CallCompiled) -> None:
    """Undo `watch_compiled`."""
    if call in _compiled:
        _compiled.remove(call)
    _release_executor()


def _watch_executor() -> None:
    if _executor:
        return
    kind = _jit_executor()
    original = kind.__call__

    def call(executor: Any, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(original, executor)
        watcher = _compiled[-1] if _compiled and not _running else None
        _begin_compiled()
        try:
            return run(*args, **kwargs) if watcher is None else watcher(executor, run, args, kwargs)
        finally:
            _end_compiled()

    _executor.append((kind, original))
    kind.__call__ = call


def _begin_compiled() -> None:
    global _running  # noqa: PLW0603 - there is one compiler in a process
    with _lock:
        _running += 1
        for patched in _patched.values():
            patched.restore()


def _end_compiled() -> None:
    global _running  # noqa: PLW0603
    with _lock:
        _running -= 1
        if not _running:
            for patched in _patched.values():
                patched.apply()


def _release_executor() -> None:
    if not _patched and not _compiled and _executor:
        kind, original = _executor.pop()
        kind.__call__ = original


def _jit_executor() -> Any:
    """Return the class that calls compiled functions."""
    for path in ("mindspore.graph.api", "mindspore.common.api"):
        try:
            found = getattr(importlib.import_module(path), "_JitExecutor", None)
        except ImportError:
            continue
        if found is not None and "__call__" in vars(found):
            return found
    raise RuntimeError("operations of MindSpore: this version has no _JitExecutor; allowed: levels L0 and debug")
