"""The debugger's grad_probe for MindSpore: reads the gradients that an optimizer is called with."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from mindspore import Tensor, nn

from trainsentry.collectors.calls.gradient_summary import Gradient, GradientProbe, GradientSummary
from trainsentry.collectors.guard import Guard
from trainsentry.collectors.mindspore.hooks.interception import unwatch_calls, watch_calls
from trainsentry.collectors.mindspore.rows.tensor_statistics import array_of, as_float, row_of_values


class OptimizerGradientProbe(GradientProbe):
    """Probes the gradients given to an optimizer; `wanted` are steps and parameters, empty for all.

    It intercepts the optimizer's calls, so it misses those inside a compiled step.
    """

    def __init__(
        self, optimizer: nn.Cell, summary: GradientSummary, wanted: tuple[Sequence[int], Sequence[str]], guard: Guard
    ) -> None:
        names = [p.name for p in optimizer.parameters]
        super().__init__(summary, wanted, names, "the optimizer's parameters", guard)
        self.optimizer = optimizer
        watch_calls(optimizer, self)

    def close(self) -> None:
        """Stop intercepting the optimizer's calls."""
        unwatch_calls(self.optimizer, self)

    def enter(self, cell: nn.Cell, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Write the gradients that an update is called with."""
        del cell
        given = args[0] if args else next(iter(kwargs.values()), ())
        gradients = given if isinstance(given, (tuple, list)) else (given,)
        self.before_update(partial(self._gradients, gradients))

    def leave(self, cell: nn.Cell, output: Any) -> None:
        """Do nothing after an update."""

    def _gradients(self, given: Sequence[Any]) -> Iterator[Gradient]:
        for parameter, gradient in zip(self.optimizer.parameters, given, strict=False):
            if isinstance(gradient, Tensor) and self.chooses(parameter.name):
                values = as_float(array_of(gradient))
                raw = partial(_bytes, gradient)
                yield Gradient(parameter.name, values, raw, row_of_values(values, 0.0), tuple(gradient.shape))


def _bytes(gradient: Tensor) -> bytes:
    return np.ascontiguousarray(gradient.asnumpy()).tobytes()
