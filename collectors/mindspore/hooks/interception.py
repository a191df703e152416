"""Intercepts the calls of single cells, without any effect on compiled code.

Hooks on a cell become part of its graph: some keep it from compiling, others never run visibly (MindSpore 2.10).
Instead, the cell object gets its own subclass of the same name with another `__call__`. A compiler reads only
`construct`, so numerics stay identical to the bit, and changing the class causes no recompilation.
"""

from typing import Any, Final, Protocol

from mindspore import nn


class CellListener(Protocol):
    """Is called around each call of a cell. Its methods contain their own failures."""

    def enter(self, cell: nn.Cell, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called before a call; returns `(args, kwargs)` to pass instead, or None."""

    def leave(self, cell: nn.Cell, output: Any) -> Any:
        """Called after a call; returns the output to pass on instead, or None."""


_listeners: dict[int, list[CellListener]] = {}
_classes: dict[type, type] = {}
_OURS: Final = "__trainsentry_original__"


def watch_calls(cell: nn.Cell, listener: CellListener) -> None:
    """Report the calls of a cell to `listener`, after the earlier listeners."""
    if _OURS not in vars(type(cell)):
        _listeners[id(cell)] = []
        cell.__class__ = _subclass(type(cell))
    _listeners.setdefault(id(cell), []).append(listener)


def unwatch_calls(cell: nn.Cell, listener: CellListener) -> None:
    """Report no more calls to `listener`; after the last one, restore the cell's own class."""
    left = [w for w in _listeners.get(id(cell), []) if w is not listener]
    if left:
        _listeners[id(cell)] = left
        return
    _listeners.pop(id(cell), None)
    if _OURS in vars(type(cell)):
        cell.__class__ = vars(type(cell))[_OURS]


def own_class(cell: Any) -> type:
    """Return the cell's original class."""
    original: type = vars(type(cell)).get(_OURS, type(cell))
    return original


def _subclass(original: type) -> type:
    known = _classes.get(original)
    if known is not None:
        return known

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        listeners = tuple(_listeners.get(id(self), ()))
        for listener in listeners:
            changed = listener.enter(self, args, kwargs)
            if changed is not None:
                args, kwargs = changed
        output = original.__call__(self, *args, **kwargs)
        for listener in reversed(listeners):
            changed = listener.leave(self, output)
            if changed is not None:
                output = changed
        return output

    def reduce(self: Any, protocol: Any) -> Any:
        """Copy and pickle with the original class, so that copies are not watched."""
        made: Any = getattr(original, "__reduce_ex__")(self, protocol)  # noqa: B009 - typed for object only
        function, args, *rest = made
        return (function, tuple(original if arg is type(self) else arg for arg in args), *rest)

    names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    made = type(original.__name__, (original,), {**names, _OURS: original, "__call__": call, "__reduce_ex__": reduce})
    _classes[original] = made
    return made
