"""Tells before a collective writes tensors: autograd does not count that as a change."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

from torch import Tensor

from trainsentry.collectors.guard import Guard
from trainsentry.collectors.torch.distributed.process_groups import (
    CollectiveListener,
    CollectiveOp,
    forget_calls,
    tensors_of,
    watch_calls,
)
from trainsentry.collectors.torch.hooks.backward_pass import in_backward

PART: Final = "collective writes"


class CollectiveWrites(CollectiveListener):
    """Calls `before_write` with the tensors that the next collective or receive fills, until `remove`.

    What was noted of such a tensor holds no longer, and what waits to be read of it must be read first. Calls of other
    threads, such as a checkpoint's, are not told.
    """

    def __init__(self, guard: Guard, before_write: Callable[[Sequence[Tensor]], None]) -> None:
        self.guard = guard
        self.before_write = before_write
        self._thread = threading.get_ident()
        watch_calls(self)

    def begin(self, op: CollectiveOp, group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tell what a call fills."""
        if op.outputs and (threading.get_ident() == self._thread or in_backward()):
            self.guard.run(PART, self._tell, op, args, kwargs)

    def remove(self) -> None:
        """Tell no more."""
        forget_calls(self)

    def _tell(self, op: CollectiveOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = tensors_of(args, kwargs, op.outputs)
        if tensors:
            self.before_write(tensors)
