"""Intercepts the collectives that the reducer of DistributedDataParallel calls from C++.

The reducer calls no method that Python could patch. But the methods of a process group call operators of the dispatcher
(`c10d::allreduce_`), and the monitor registers kernels for these that report each call and pass it on. They are
registered only while calls are watched and a model is under DistributedDataParallel.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist

from trainsentry.collectors.torch.hooks.backward_pass import after_backward, in_backward

OPERATORS: Final = {"allreduce_": "allreduce", "broadcast_": "broadcast"}
"""Operators that the reducer calls, each with the corresponding method of a process group."""

_KEY: Final = "Autograd"
"""Dispatch key of the kernels; these operators have no kernel of their own there, so none is replaced."""

_python = threading.local()


@contextmanager
def called_from_python() -> Iterator[None]:
    """Mark a call made by a patched method, which is reported there and not by the kernel."""
    outer = getattr(_python, "calling", False)
    _python.calling = True
    try:
        yield
    finally:
        _python.calling = outer


def watch_reducer(make_call: Callable[[str, tuple[Any, ...], Callable[[], Any]], Any]) -> Callable[[], None]:
    """Route each C++ call through `make_call(method, arguments, call)`, which returns the result of `call()`.

    `arguments` are the operator's: tensors, then the boxed process group. Return the function that undoes it.
    """
    library = torch.library.Library("c10d", "IMPL")  # the returned method keeps it, and so the kernels, alive
    for name, method in OPERATORS.items():
        operator = getattr(torch.ops.c10d, name).default
        library.impl(name, functools.partial(_kernel, operator, method, make_call), _KEY, with_keyset=True)
    return library._destroy


def group_of(boxed: Any) -> Any:
    """Return the process group that the dispatcher has boxed."""
    return dist.ProcessGroup.unbox(boxed)


def reduction_in(boxed: Any) -> str:
    """Return the name of a boxed reduction: `sum`, `avg`, …; empty when it is unknown."""
    get = getattr(boxed, "_get_method", None)
    if get is None:
        return ""
    number = int(get("op")())
    names = {member.value: name.lower() for name, member in dist.ReduceOp.RedOpType.__members__.items()}
    return names.get(number, "")


class ReducerCalls:
    """Follows C++ calls to their ends, which are not reported: the reducer waits at the end of a backward pass.

    Calls `waits(call)` when the wait begins, `ended(calls)` when it is over. The reducer waits at once for the calls of
    a forward pass (buffers); their end is marked by `forward_ended`.
    """

    def __init__(self, waits: Callable[[Any], None], ended: Callable[[list[Any]], None]) -> None:
        self._waits = waits
        self._ended = ended
        self._backward: list[Any] = []
        self._forward: list[Any] = []

    @property
    def open(self) -> list[Any]:
        """Calls that have not ended."""
        return [*self._forward, *self._backward]

    def started(self, call: Any) -> None:
        """Add a call that has just been made."""
        if not in_backward():
            self._forward.append(call)
            if len(self._forward) == 1:
                self._waits(call)
            return
        self._backward.append(call)
        if len(self._backward) == 1:
            after_backward(self._waits_now)

    def forward_ended(self) -> None:
        """End the calls that a forward pass made."""
        self._end(self._forward)

    def forget(self) -> None:
        """Forget calls whose end was not reported, as in a failed backward pass."""
        self._backward.clear()
        self._forward.clear()

    def _waits_now(self) -> None:
        # The reducer queued its callback after ours, so it waits next, and the callback queued here runs after that.
        if self._backward:
            self._waits(self._backward[0])
            after_backward(lambda: self._end(self._backward))

    def _end(self, calls: list[Any]) -> None:
        ended = calls[:]
        calls.clear()
        if ended:
            self._ended(ended)


def _kernel(operator: Any, method: str, make_call: Any, keyset: Any, *arguments: Any) -> Any:
    below = keyset & torch._C._after_autograd_keyset

    def call() -> Any:
        return operator.redispatch(below, *arguments)

    if getattr(_python, "calling", False):
        return call()
    return make_call(method, arguments, call)
