"""Calls that were made without a graph and are made again in the backward pass: which of them is which."""

from collections import deque

from trainsentry.collectors.named_module import NamedModule

_Key = tuple[str, int]
_Place = tuple[int, int]


class RecomputedCalls:
    """Remembers a step's calls of modules while gradients were off: (micro-step, call) of each.

    A reentrant checkpoint runs its part of the model so, and again with gradients on when the backward pass comes to
    it. Micro-steps come back in their order. Of a module that was called more than once in a pass it cannot be told
    which call comes back first: segments return in reverse, the calls inside one do not. Such a module is left out.
    """

    def __init__(self) -> None:
        self._waiting: dict[_Key, deque[_Place]] = {}
        self._unclear: set[_Key] = set()

    def clear(self) -> None:
        """Begin a step."""
        self._waiting.clear()
        self._unclear.clear()

    def made(self, named: NamedModule, micro_step: int, call: int) -> None:
        """Note a call that was made without a graph."""
        key = (named.name, named.vpp_stage)
        waiting = self._waiting.setdefault(key, deque())
        if call or (waiting and waiting[-1][0] == micro_step):
            self._unclear.add(key)
        waiting.append((micro_step, call))

    def again(self, named: NamedModule) -> _Place | None:
        """Return which call is being made again, None where that is not known."""
        key = (named.name, named.vpp_stage)
        waiting = self._waiting.get(key)
        return waiting[0] if waiting and key not in self._unclear else None

    def done(self, named: NamedModule) -> None:
        """Note that the call has been made again."""
        waiting = self._waiting.get((named.name, named.vpp_stage))
        if waiting:
            waiting.popleft()
