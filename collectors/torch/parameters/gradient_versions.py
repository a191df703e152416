"""Notes gradients that are written more often before an update than the others, without reading their values."""

import operator
from collections import Counter
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, Final

from torch import Tensor
from torch.optim import Optimizer

from trainsentry.collectors.series import LOOKED_AT_EVERY
from trainsentry.collectors.torch.parameters.outside_writes import LEARNED, LastingWrites
from trainsentry.collectors.torch.rows.local_tensor import version_of

MOST_AT_ONCE: Final = 0.25
"""Share of the gradients up to which those that are written more are a fault of theirs: more is the loop's doing."""

_VERSION: Final = operator.attrgetter("grad._version")


@dataclass(eq=False, slots=True)
class GradientVersions:
    """How much oftener each gradient of an optimizer was written than most of them, by torch's counts of changes.

    Micro-steps, unscaling and clipping write to all alike. A tied weight has one write more at every update, and an
    expert that a micro-step leaves out one less; so only one that was never written so often counts, of those that have
    found their largest number. Where gradients are kept, as DDP's views of its buckets are, that grows and grows.
    """

    parameters: list[Tensor] = field(default_factory=list)
    most: list[int] = field(default_factory=list)
    grew_at: list[int] = field(default_factory=list)
    updates: int = 0
    lasting: LastingWrites = field(default_factory=LastingWrites)

    def read(self, optimizer: Optimizer) -> list[tuple[Tensor, int]]:
        """Return the parameters whose gradients have been written so for a while, and how many times more, before one.

        Those are told of once.
        """
        self.updates += 1
        if self.updates % LOOKED_AT_EVERY and not self.lasting.since:
            return []
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if len(parameters) != len(self.parameters) or any(map(operator.is_not, parameters, self.parameters)):
            self.parameters, self.most, self.grew_at = parameters, [0] * len(parameters), [0] * len(parameters)
            self.updates = 0
            self.lasting.end()
        return self._compare(_above_most(parameters))

    def _compare(self, above: list[int]) -> list[tuple[Tensor, int]]:
        more = list(compress(range(len(above)), map(operator.gt, above, self.most)))
        few = len(more) <= max(1, MOST_AT_ONCE * len(above))
        settled = [i for i in more if few and self.updates - self.grew_at[i] > LEARNED]
        self.lasting.note(above, self.most, settled)
        found = [(self.parameters[i], above[i] - limit) for i, limit in self.lasting.due]
        for i in more:
            self.most[i], self.grew_at[i] = above[i], self.updates
        return found


def _above_most(parameters: list[Tensor]) -> list[int]:
    """Return how much larger each gradient's count is than the commonest one; that of no gradient is far below."""
    try:
        counts: list[Any] = list(map(_VERSION, parameters))
    except (AttributeError, RuntimeError):
        counts = [_count_of(p) for p in parameters]
    usual = Counter(c for c in counts if c is not None).most_common(1)
    least = -(2**31)
    return [least if c is None or not usual else c - usual[0][0] for c in counts]


def _count_of(parameter: Tensor) -> int | None:
    gradient = parameter.grad
    return None if gradient is None else version_of(getattr(gradient, "_local_tensor", gradient))
