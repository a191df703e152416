"""Functions that others stand in for while someone watches, and never while anything compiled is called.

A compiler would compile the stand-ins: so everything is as it was from the beginning of a compiled call to its end.
Several watchers may stand in for one function; each is taken away by itself, in any order.
"""

import functools
import importlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

Function = Callable[..., Any]
Make = Callable[[Function], Function]
"""Returns what stands in for a function."""

Compiled = Callable[[Any, Function, tuple[Any, ...], dict[str, Any]], Any]
"""Makes a compiled call: it is given the executor, what runs it, and the arguments."""

_MISSING: Final = object()


@dataclass
class _Place:
    """Where a function hangs, what hung there by itself (a class may only have inherited it), and what stands in."""

    owner: Any
    name: str
    own: Any
    function: Function
    makes: list[Make] = field(default_factory=list)
    stands: bool = False

    def put(self) -> None:
        function: Any = self.function
        for make in self.makes:
            function = make(function)
        bound = isinstance(self.own, (staticmethod, classmethod))  # it is given no object by itself
        setattr(self.owner, self.name, staticmethod(function) if bound else function)
        self.stands = True

    def restore(self) -> None:
        if not self.stands:
            return
        self.stands = False
        if self.own is _MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.own)


_places: dict[tuple[int, str], _Place] = {}
_compiled: list[Compiled] = []
_executor: list[tuple[Any, Function]] = []
_lock: Final = threading.RLock()
_running = 0  # compiled calls under way, in all threads


def stand_in(owner: Any, name: str, make: Make) -> None:
    """Have what `make` returns stand in for `owner.name`; where that cannot be set, nothing happens.

    Raises:
        RuntimeError: where it is not known how this version of MindSpore calls what is compiled.

    """
    _watch_executor()
    key = (id(owner), name)
    place = _places.get(key)
    if place is None:
        place = _Place(owner, name, vars(owner).get(name, _MISSING), getattr(owner, name))
    with _lock:
        place.makes.append(make)
        try:
            place.put()
        except (AttributeError, TypeError):  # a class that cannot be changed
            place.makes.remove(make)
            return
        _places[key] = place
        if _running:
            place.restore()


def take_away(owner: Any, name: str, make: Make) -> None:
    """Undo `stand_in`."""
    place = _places.get((id(owner), name))
    if place is None or make not in place.makes:
        return
    with _lock:
        place.makes.remove(make)
        place.restore()
        if not place.makes:
            del _places[id(owner), name]
        elif not _running:
            place.put()
    _leave_executor()


def watch_compiled(compiled: Compiled) -> None:
    """Have `compiled` make the calls of what is compiled.

    Raises:
        RuntimeError: as `stand_in`.

    """
    _watch_executor()
    _compiled.append(compiled)


def forget_compiled(compiled: Compiled) -> None:
    """Undo `watch_compiled`."""
    if compiled in _compiled:
        _compiled.remove(compiled)
    _leave_executor()


def _watch_executor() -> None:
    if _executor:
        return
    kind = _jit_executor()
    original = kind.__call__

    def call(executor: Any, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(original, executor)
        seen = _compiled[-1] if _compiled and not _running else None
        _begin_compiled()
        try:
            return run(*args, **kwargs) if seen is None else seen(executor, run, args, kwargs)
        finally:
            _end_compiled()

    _executor.append((kind, original))
    kind.__call__ = call


def _begin_compiled() -> None:
    global _running  # noqa: PLW0603 - there is one compiler in a process
    with _lock:
        _running += 1
        for place in _places.values():
            place.restore()


def _end_compiled() -> None:
    global _running  # noqa: PLW0603
    with _lock:
        _running -= 1
        if not _running:
            for place in _places.values():
                place.put()


def _leave_executor() -> None:
    if not _places and not _compiled and _executor:
        kind, original = _executor.pop()
        kind.__call__ = original


def _jit_executor() -> Any:
    """Return the class by which compiled functions are called."""
    for path in ("mindspore.graph.api", "mindspore.common.api"):
        try:
            found = getattr(importlib.import_module(path), "_JitExecutor", None)
        except ImportError:
            continue
        if found is not None and "__call__" in vars(found):
            return found
    raise RuntimeError("operations of MindSpore: this version has no _JitExecutor; allowed: levels L0 and debug")
