"""Detects captures of device graphs, during which the monitor launches, waits for and allocates nothing on a device.

A captured stream records its work instead of running it; waiting for a device, even from another thread, ends the
capture with an error. A replay runs the recorded work without any Python, so no hook is called.

A device's `graph` and `make_graphed_callables` and inductor's graph trees all begin and end with methods of one class,
which are patched while a model is watched. A capture begun in C++ is detected by its stream.
"""

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any, Final

from trainsentry.collectors.guard import Guard
from trainsentry.collectors.torch.device.device import Device
from trainsentry.collectors.torch.device.registry import known_devices, stream_is_captured

__all__ = ["GraphCaptures", "stream_is_captured"]

CAPTURED_REPLAYS: Final = 2
"""Replays without an observed step after which a warning is due, once an optimizer's step was captured."""

ANY_REPLAYS: Final = 100
"""The same when no optimizer's step was captured: many, as some graphs only generate or evaluate."""

UNSEEN: Final = (
    "a captured graph is replayed and no step is seen: replays run no hooks. Call monitor.step() after each replay "
    "that trains; gradients, weights and optimizer state are then read between replays, activations are not."
)
"""Warning for training steps that happen inside replays."""


class GraphCaptures:
    """Suspends a guard while a graph is captured, and warns when training steps happen inside replays.

    `make_graphed_callables` refuses modules with hooks: `detach` removes the monitor's, `attach` restores them.
    """

    def __init__(self, guard: Guard, detach: Callable[[], None], attach: Callable[[], None]) -> None:
        self.guard = guard
        self.detach = detach
        self.attach = attach
        self.captured_step = False
        self._replays = 0
        self._stepped = False
        _watching.add(self)
        _patch()

    def close(self) -> None:
        """Stop watching; the last one to stop undoes the patches."""
        _watching.discard(self)
        if not _watching:
            _unpatch()

    @property
    def has_replayed(self) -> bool:
        """Whether a captured graph, whose writes torch does not count, has run since the last step."""
        return self._replays > 0

    def captures_step(self, optimizer: Any) -> bool:
        """Whether a device captures this optimizer step instead of running it; its replays are then the steps."""
        if not self.guard.suspended and not stream_is_captured():
            return False
        self.captured_step = True
        self._replays = 0
        return True

    def note_step(self) -> None:
        """Note that an observed step has ended."""
        self._replays = 0
        self._stepped = True

    def note_replay(self) -> None:
        """Note a replay; warn when steps seem to happen only in replays."""
        self._replays += 1
        bound = CAPTURED_REPLAYS if self.captured_step else ANY_REPLAYS
        if self._replays >= bound and (self.captured_step or not self._stepped):
            self.guard.warn_once("captured steps", UNSEEN)


_watching: "weakref.WeakSet[GraphCaptures]" = weakref.WeakSet()
_patched: list[tuple[Any, str, Any]] = []


def _patch() -> None:
    if _patched:
        return
    for device in known_devices():
        _patch_graphs_of(device)


def _patch_graphs_of(device: Device) -> None:
    graph = device.graph_type()
    if graph is None:
        return
    _replace(graph, "capture_begin", _holding)
    _replace(graph, "capture_end", _releasing)
    _replace(graph, "replay", _counting)
    for holder in (device.module, sys.modules.get(f"{device.module.__name__}.graphs")):
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
            captures.detach()
        _hold()
        try:
            return original(*args, **kwargs)
        finally:
            _release()
            for captures in watching:
                captures.attach()

    return make_graphed_callables


def _hold() -> None:
    for captures in _watching:
        captures.guard.suspended += 1


def _release() -> None:
    for captures in _watching:
        captures.guard.suspended = max(captures.guard.suspended - 1, 0)
