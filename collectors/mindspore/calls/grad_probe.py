"""Gradients of chosen parameters on disk, as an optimizer is given them."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from mindspore import Tensor, nn

from trainsentry.collectors.calls.gradient_summary import Gradient, GradientSummary
from trainsentry.collectors.guard import Guard
from trainsentry.collectors.mindspore.hooks.interception import unwatch_calls, watch_calls
from trainsentry.collectors.mindspore.rows.host_statistics import array_of, as_float, row_of_values

PART: Final = "grad_probe"


class GradientProbe:
    """Writes a summary before each update of an optimizer; `wanted` are steps and parameters, nothing means all.

    It sees the optimizer's calls, so not those inside a compiled step.
    """

    def __init__(
        self, optimizer: nn.Cell, summary: GradientSummary, wanted: tuple[Sequence[int], Sequence[str]], guard: Guard
    ) -> None:
        self.optimizer = optimizer
        self.summary = summary
        self.steps, self._names = set(wanted[0]), set(wanted[1])
        self.guard = guard
        self.step = 0
        unknown = self._names - {p.name for p in optimizer.parameters}
        if unknown:
            raise ValueError(f"grad_probe.param_list: {min(unknown)!r}; allowed: names of the optimizer's parameters")
        watch_calls(optimizer, self)

    def close(self) -> None:
        """Write no more."""
        unwatch_calls(self.optimizer, self)

    def enter(self, cell: nn.Cell, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An update begins."""
        del cell
        given = args[0] if args else next(iter(kwargs.values()), ())
        if not self.steps or self.step in self.steps:
            gradients = given if isinstance(given, (tuple, list)) else (given,)
            self.guard.run(PART, lambda: self.summary.write(self.step, self._gradients(gradients)))
        self.step += 1

    def leave(self, cell: nn.Cell, output: Any) -> None:
        """It is over."""

    def _gradients(self, given: Sequence[Any]) -> Iterator[Gradient]:
        for parameter, gradient in zip(self.optimizer.parameters, given, strict=False):
            if isinstance(gradient, Tensor) and (not self._names or parameter.name in self._names):
                values = as_float(array_of(gradient))
                raw = partial(_bytes, gradient)
                yield Gradient(parameter.name, values, raw, row_of_values(values, 0.0), tuple(gradient.shape))


def _bytes(gradient: Tensor) -> bytes:
    return np.ascontiguousarray(gradient.asnumpy()).tobytes()
