"""Matches the calls that a reentrant checkpoint repeats in the backward pass to their first calls without a graph."""

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
class _CallsWithoutGraph:
    """The calls of one thread while gradients were off.

    `calls` holds, by module: the number of `ends` before the call, autograd's next node number, and the call. An end is
    the next node number when a module is first entered with gradients on again.
    """

    calls: dict[_Key, list[tuple[int, int, _Place | None]]] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)
    open: bool = False

    def find(self, key: _Key, node: int, turn: int) -> _Place | None:
        """Return call number `turn` of a module inside a checkpoint, given the number of the checkpoint's node."""
        segment = bisect_right(self.ends, node)
        calls = self.calls.get(key, [])
        at = bisect_right(calls, (segment, node), key=lambda call: call[:2]) + turn
        return calls[at][2] if at < len(calls) and calls[at][0] == segment else None


class RecomputedCalls:
    """Records a step's calls of modules while gradients were off, as (micro-step, call).

    A reentrant checkpoint runs its part of the model without gradients, and again with gradients when the backward pass
    reaches its node. Autograd numbers the nodes of each thread in order: calls inside a checkpoint were made when the
    next number was greater than its node's, and are repeated in the same order. A checkpoint inside another is created
    again in the backward pass of the outer one, by the thread that runs it.
    """

    def __init__(self) -> None:
        self._noted: dict[int, _CallsWithoutGraph] = {}
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
        """Note a call made without a graph; `place` is None for one that is not recorded."""
        thread = threading.get_ident()
        if not in_backward():
            self._forward_thread = thread
        noted = self._noted.setdefault(thread, _CallsWithoutGraph())
        noted.open = True
        call = (len(noted.ends), next_node_number(), place)
        noted.calls.setdefault((named.name, named.vpp_stage), []).append(call)

    def with_graph(self) -> None:
        """Note that a module is entered with gradients on, which ends a section without gradients."""
        noted = self._noted.get(threading.get_ident()) if self._noted else None
        if noted is not None and noted.open:
            noted.open = False
            noted.ends.append(next_node_number())

    def entered(self, named: NamedModule) -> _Place | None:
        """Return the call that is being repeated; None for one that was not noted."""
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
        """Return the call whose repetition has ended."""
        return self._open.pop((named.name, named.vpp_stage), None)

    def _outer_ended(self) -> None:
        """Forget the calls of backward threads when their pass has ended: another thread may reuse the number."""
        self._outer = None
        self._noted = {thread: noted for thread, noted in self._noted.items() if thread == self._forward_thread}
