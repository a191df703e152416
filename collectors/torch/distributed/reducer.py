"""What the reducer of DistributedDataParallel asks of a process group by itself, in C++.

It calls no method that Python could wrap; but the methods of a process group hand over to operators of the dispatcher
(`c10d::allreduce_`), and an operator can be given a kernel of ours that looks, and passes on. It is there while it is
wanted, and only where a model is under DistributedDataParallel.
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
"""Operators that the reducer uses, with the method of a process group that stands for each."""

_KEY: Final = "Autograd"
"""Nothing is registered there for these operators, so that nothing is replaced."""

_python = threading.local()


@contextmanager
def asked_in_python() -> Iterator[None]:
    """Mark a call that a wrapped method of Python makes: it is seen there."""
    outer = getattr(_python, "asking", False)
    _python.asking = True
    try:
        yield
    finally:
        _python.asking = outer


def watch_reducer(around: Callable[[str, tuple[Any, ...], Callable[[], Any]], Any]) -> Callable[[], None]:
    """Have `around(method, arguments, call)` make each call of C++, and return its result; return what undoes it.

    `arguments` are those of the operator: tensors, then the boxed process group.
    """
    library = torch.library.Library("c10d", "IMPL")  # held by what undoes it: without it the kernels are gone
    for name, method in OPERATORS.items():
        operator = getattr(torch.ops.c10d, name).default
        library.impl(name, functools.partial(_kernel, operator, method, around), _KEY, with_keyset=True)
    return library._destroy


def group_of(boxed: Any) -> Any:
    """Return the process group in a box of the dispatcher."""
    return dist.ProcessGroup.unbox(boxed)


def reduction_in(boxed: Any) -> str:
    """Return how a boxed reduction is called: `sum`, `avg`, …; empty when it cannot be told."""
    get = getattr(boxed, "_get_method", None)
    if get is None:
        return ""
    number = int(get("op")())
    names = {member.value: name.lower() for name, member in dist.ReduceOp.RedOpType.__members__.items()}
    return names.get(number, "")


class ReducerCalls:
    """Follows calls of C++ to their ends, which nobody tells: the reducer waits at the end of a backward pass.

    `waits(call)` is told when it begins to, `ended(calls)` when it has. For calls of a forward pass (buffers) it waits
    at once, and `forward_ended` is to be called.
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
        """Take a call that was made just now."""
        if not in_backward():
            self._forward.append(call)
            if len(self._forward) == 1:
                self._waits(call)
            return
        self._backward.append(call)
        if len(self._backward) == 1:
            after_backward(self._waits_now)

    def forward_ended(self) -> None:
        """End the calls that a forward pass has made."""
        self._end(self._forward)

    def forget(self) -> None:
        """Forget calls whose end was not told: a backward pass that failed."""
        self._backward.clear()
        self._forward.clear()

    def _waits_now(self) -> None:
        # The reducer asked to be called after the backward pass, later than we did: it waits next, and we come after.
        if self._backward:
            self._waits(self._backward[0])
            after_backward(lambda: self._end(self._backward))

    def _end(self, calls: list[Any]) -> None:
        ended = calls[:]
        calls.clear()
        if ended:
            self._ended(ended)


def _kernel(operator: Any, method: str, around: Any, keyset: Any, *arguments: Any) -> Any:
    below = keyset & torch._C._after_autograd_keyset

    def call() -> Any:
        return operator.redispatch(below, *arguments)

    if getattr(_python, "asking", False):
        return call()
    return around(method, arguments, call)
