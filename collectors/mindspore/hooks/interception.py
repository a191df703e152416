"""Sees the calls of single cells, and leaves no trace where cells are compiled.

Hooks that stay on a cell become part of its graph: some stop it from compiling, others run without being seen
(MindSpore 2.10). A cell's call is seen instead by giving that one object a class of its own, of the same name, with
another `__call__`. A compiler looks at `construct` alone; the numbers are the same to the bit, and nothing is compiled
anew when the class comes or goes.
"""

from typing import Any, Final, Protocol

from mindspore import nn


class CellListener(Protocol):
    """Whom the calls of a cell are told to. Its methods contain their own failures."""

    def enter(self, cell: nn.Cell, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take note of a call that begins; return what it is to be given instead, `(args, kwargs)`, or None."""

    def leave(self, cell: nn.Cell, output: Any) -> Any:
        """Take note of a call that has ended; return what it is to give instead, or None."""


_watchers: dict[int, list[CellListener]] = {}
_classes: dict[type, type] = {}
_OURS: Final = "__trainsentry_original__"


def watch_calls(cell: nn.Cell, watcher: CellListener) -> None:
    """Tell `watcher` of the calls of a cell, after those who are told already."""
    if _OURS not in vars(type(cell)):
        _watchers[id(cell)] = []
        cell.__class__ = _subclass(type(cell))
    _watchers.setdefault(id(cell), []).append(watcher)


def unwatch_calls(cell: nn.Cell, watcher: CellListener) -> None:
    """Tell `watcher` no more; the cell has its own class again when nobody is left."""
    left = [w for w in _watchers.get(id(cell), []) if w is not watcher]
    if left:
        _watchers[id(cell)] = left
        return
    _watchers.pop(id(cell), None)
    if _OURS in vars(type(cell)):
        cell.__class__ = vars(type(cell))[_OURS]


def own_class(cell: Any) -> type:
    """Return the class that a cell's author gave it."""
    original: type = vars(type(cell)).get(_OURS, type(cell))
    return original


def _subclass(original: type) -> type:
    known = _classes.get(original)
    if known is not None:
        return known

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        watchers = tuple(_watchers.get(id(self), ()))
        for watcher in watchers:
            changed = watcher.enter(self, args, kwargs)
            if changed is not None:
                args, kwargs = changed
        output = original.__call__(self, *args, **kwargs)
        for watcher in reversed(watchers):
            changed = watcher.leave(self, output)
            if changed is not None:
                output = changed
        return output

    def reduce(self: Any, protocol: Any) -> Any:
        """Copy and pickle as what the cell is: copies are not watched."""
        made: Any = getattr(original, "__reduce_ex__")(self, protocol)  # noqa: B009 - typed for object only
        function, args, *rest = made
        return (function, tuple(original if arg is type(self) else arg for arg in args), *rest)

    names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    made = type(original.__name__, (original,), {**names, _OURS: original, "__call__": call, "__reduce_ex__": reduce})
    _classes[original] = made
    return made
