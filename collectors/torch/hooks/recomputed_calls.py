"""Calls that were made without a graph and are made again in the backward pass: which of them is which."""

import threading
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field

from trainsentry.collectors.shared.model_graph import NamedModule
from trainsentry.collectors.torch.hooks.backward_pass import (
    after_backward,
    graph_task,
    in_backward,
    next_node_number,
    node_number,
)

_Key = tuple[str, int]
_Place = tuple[int, int]


@dataclass
class _Noted:
    """What was called in one thread while gradients were off.

    `calls` by module: after how many of `ends`, autograd's next number, and which call it was. An end is the next
    number when a module was first entered with gradients on again.
    """

    calls: dict[_Key, list[tuple[int, int, _Place | None]]] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)
    open: bool = False

    def find(self, key: _Key, node: int, turn: int) -> _Place | None:
        """Return the `turn`-th call of a module that a node has made: before it ended, and after its own number."""
        segment = bisect_right(self.ends, node)
        calls = self.calls.get(key, [])
        at = bisect_right(calls, (segment, node), key=lambda call: call[:2]) + turn
        return calls[at][2] if at < len(calls) and calls[at][0] == segment else None


class RecomputedCalls:
    """Remembers a step's calls of modules while gradients were off: (micro-step, call) of each.

    A reentrant checkpoint runs its part of the model so, and again with gradients on when the backward pass comes to
    its node. Autograd numbers nodes as they are made, in each thread: what ran inside a checkpoint was called when the
    next number was beyond that of its node, and comes again in the order in which it was called. A checkpoint inside
    another is made anew in the backward pass of that one, by the thread that runs it.
    """

    def __init__(self) -> None:
        self._noted: dict[int, _Noted] = {}
        self._forward_thread = 0
        self._segment = (-1, -1)
        self._turns: Counter[_Key] = Counter()
        self._open: dict[_Key, _Place | None] = {}
        self._outer: int | None = None

    def clear(self) -> None:
        """Begin a step."""
        self._noted.clear()
        self._turns.clear()
        self._open.clear()
        self._segment, self._outer = (-1, -1), None

    def made(self, named: NamedModule, place: _Place | None) -> None:
        """Note a call that was made without a graph; `place` is None for one that is not recorded."""
        thread = threading.get_ident()
        if not in_backward():
            self._forward_thread = thread
        noted = self._noted.setdefault(thread, _Noted())
        noted.open = True
        call = (len(noted.ends), next_node_number(), place)
        noted.calls.setdefault((named.name, named.vpp_stage), []).append(call)

    def with_graph(self) -> None:
        """Note that a module is entered with gradients on: what was called without them has ended."""
        noted = self._noted.get(threading.get_ident()) if self._noted else None
        if noted is not None and noted.open:
            noted.open = False
            noted.ends.append(next_node_number())

    def entered(self, named: NamedModule) -> _Place | None:
        """Return which call is being made again, None where it is none of those that were noted."""
        key, segment = (named.name, named.vpp_stage), (graph_task(), node_number())
        if segment != self._segment:
            self._segment = segment
            self._turns.clear()
        is_inside_another = self._outer not in (None, segment[0])
        noted = self._noted.get(threading.get_ident() if is_inside_another else self._forward_thread)
        place = None
        if noted is not None and segment[1] >= 0:
            place = noted.find(key, segment[1], self._turns[key])
        self._open[key] = place
        self._turns[key] += 1
        if place is not None and self._outer is None:
            self._outer = segment[0]
            after_backward(self._outer_ended)
        return place

    def left(self, named: NamedModule) -> _Place | None:
        """Return which call has been made again."""
        return self._open.pop((named.name, named.vpp_stage), None)

    def _outer_ended(self) -> None:
        """Forget what was noted by the thread of a backward pass that has ended: another may have its number."""
        self._outer = None
        self._noted = {thread: noted for thread, noted in self._noted.items() if thread == self._forward_thread}
