"""Captures of device graphs: while one is open the monitor launches nothing, waits for nothing, allocates nothing.

What a stream does while it is captured is recorded and not run, and whatever waits for a device then ends the capture
with an error, from other threads too. A replay runs what was recorded and no Python: no hook tells of it.

`torch.cuda.graph`, `make_graphed_callables` and the trees of graphs that inductor makes all begin and end with the
methods of one class; those are wrapped while someone watches. A capture that is begun in C++ shows in its stream.
"""

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch

from trainsentry.collectors.guard import Guard

_GRAPHS: Final = (("cuda", "CUDAGraph"), ("npu", "NPUGraph"))
"""Device modules of torch, and their class of captured graphs."""

CAPTURED_REPLAYS: Final = 2
"""Replays without a step, once an optimizer's step was captured, from which on steps are said to happen unseen."""

ANY_REPLAYS: Final = 100
"""The same where it is not known what the graphs do: many, as some only generate or evaluate."""

UNSEEN: Final = (
    "a captured graph is replayed and no step is seen: replays run no hooks. Call monitor.step() after each replay "
    "that trains; gradients, weights and optimizer state are then read between replays, activations are not."
)


def stream_is_captured() -> bool:
    """Whether this thread's stream, of whichever accelerator is in use, is being captured."""
    for name, _ in _GRAPHS:
        module: Any = getattr(torch, name, None)
        asked = getattr(module, "is_current_stream_capturing", None)
        if asked is not None and module.is_initialized() and asked():
            return True
    return False


class GraphCaptures:
    """Holds a guard while a graph is captured, and says so when steps happen in replays that nobody sees.

    `make_graphed_callables` takes no module that has hooks: `lay_down` takes ours off, `take_up` puts them back.
    """

    def __init__(self, guard: Guard, lay_down: Callable[[], None], take_up: Callable[[], None]) -> None:
        self.guard = guard
        self.lay_down = lay_down
        self.take_up = take_up
        self.captured_step = False
        self._replays = 0
        self._stepped = False
        _watching.add(self)
        _patch()

    def close(self) -> None:
        """Stop watching; the last that does so undoes the patches."""
        _watching.discard(self)
        if not _watching:
            _unpatch()

    def takes(self, optimizer: Any) -> bool:
        """Whether a device records this step of an optimizer instead of making it: then replays are the steps."""
        if not self.guard.held and not stream_is_captured():
            return False
        self.captured_step = True
        self._replays = 0
        return True

    def note_step(self) -> None:
        """Note that a step has ended in plain sight."""
        self._replays = 0
        self._stepped = True

    def note_replay(self) -> None:
        """Note a replay; warn where steps seem to happen in replays alone."""
        self._replays += 1
        bound = CAPTURED_REPLAYS if self.captured_step else ANY_REPLAYS
        if self._replays >= bound and (self.captured_step or not self._stepped):
            self.guard.warn_once("captured steps", UNSEEN)


_watching: "weakref.WeakSet[GraphCaptures]" = weakref.WeakSet()
_patched: list[tuple[Any, str, Any]] = []


def _patch() -> None:
    if _patched:
        return
    for module_name, class_name in _GRAPHS:
        module = getattr(torch, module_name, None)
        graph = getattr(module, class_name, None)
        if graph is not None:
            _replace(graph, "capture_begin", _holding)
            _replace(graph, "capture_end", _releasing)
            _replace(graph, "replay", _counting)
        for holder in (module, sys.modules.get(f"torch.{module_name}.graphs")):
            if holder is not None and hasattr(holder, "make_graphed_callables"):
                _replace(holder, "make_graphed_callables", _without_hooks)


def _unpatch() -> None:
    while _patched:
        holder, name, original = _patched.pop()
        setattr(holder, name, original)


def _replace(holder: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    original = vars(holder).get(name)
    if original is not None:
        _patched.append((holder, name, original))
        setattr(holder, name, wrap(original))


def _holding(original: Any) -> Any:
    @functools.wraps(original)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        _hold()
        try:
            return original(self, *args, **kwargs)
        except BaseException:
            _release()
            raise

    return capture_begin


def _releasing(original: Any) -> Any:
    @functools.wraps(original)
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        finally:
            _release()

    return capture_end


def _counting(original: Any) -> Any:
    @functools.wraps(original)
    def replay(self: Any, *args: Any, **kwargs: Any) -> Any:
        for captures in list(_watching):
            captures.note_replay()
        return original(self, *args, **kwargs)

    return replay


def _without_hooks(original: Any) -> Any:
    @functools.wraps(original)
    def make_graphed_callables(*args: Any, **kwargs: Any) -> Any:
        watching = list(_watching)
        for captures in watching:
            captures.lay_down()
        _hold()
        try:
            return original(*args, **kwargs)
        finally:
            _release()
            for captures in watching:
                captures.take_up()

    return make_graphed_callables


def _hold() -> None:
    for captures in _watching:
        captures.guard.held += 1


def _release() -> None:
    for captures in _watching:
        captures.guard.held = max(captures.guard.held - 1, 0)
