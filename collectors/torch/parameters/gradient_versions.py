"""Notes gradients that are written more often before an update than the others, without reading their values."""

import operator
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, Final

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from trainsentry.collectors.series import LOOKED_AT_EVERY
from trainsentry.collectors.torch.parameters.outside_writes import LEARNED, LastingWrites
from trainsentry.collectors.torch.rows.local_tensor import version_of
from trainsentry.collectors.torch.sharding.dtensor import is_dtensor

MOST_AT_ONCE: Final = 0.25
"""Share of the gradients up to which those that are written more are a fault of theirs: more is the loop's doing."""

_VERSION: Final = operator.attrgetter("grad._version")


@dataclass(eq=False, slots=True)
class GradientVersions:
    """How much more often each gradient of an optimizer was written than most of them, by torch's counts of changes.

    Micro-steps, unscaling and clipping write to all alike. A tied weight has one write more at every update, and an
    expert that a micro-step leaves out one less; so only one that was never written so often counts, of those that have
    found their largest number. Where gradients are kept, as DDP's views of its buckets are, that grows and grows.

    A weight that is used more often in a pass is written more often by autograd itself; so what counts in the end is
    what comes after the backward pass, in one update more, which hooks on these few gradients tell.
    """

    parameters: list[Tensor] = field(default_factory=list)
    most: list[int] = field(default_factory=list)
    grew_at: list[int] = field(default_factory=list)
    updates: int = 0
    are_sharded: bool = False
    lasting: LastingWrites = field(default_factory=LastingWrites)
    after_backward: "_AfterBackward | None" = None

    def read(self, optimizer: Optimizer) -> list[tuple[Tensor, int]]:
        """Return the parameters whose gradients have been written so for a while, and how many times more, before one.

        Those are told of once; one that begins to be is told of with 0.
        """
        self.updates += 1
        if self.after_backward is not None:
            found, self.after_backward = self.after_backward.more(), None
            return found
        if self.updates % LOOKED_AT_EVERY and not self.lasting.since:
            return []
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if len(parameters) != len(self.parameters) or any(map(operator.is_not, parameters, self.parameters)):
            self.parameters, self.most, self.grew_at = parameters, [0] * len(parameters), [0] * len(parameters)
            self.updates, self.are_sharded = 0, any(map(is_dtensor, parameters))
            self.lasting.end()
        return self._compare(_above_most(parameters, are_sharded=self.are_sharded))

    def close(self) -> None:
        """Take the hooks away."""
        if self.after_backward is not None:
            self.after_backward.more()
            self.after_backward = None

    def _compare(self, above: list[int]) -> list[tuple[Tensor, int]]:
        more = list(compress(range(len(above)), map(operator.gt, above, self.most)))
        few = len(more) <= max(1, MOST_AT_ONCE * len(above))
        settled = [i for i in more if few and self.updates - self.grew_at[i] > LEARNED]
        self.lasting.note(above, self.most, settled)
        due = [self.parameters[i] for i in self.lasting.due]
        if due and 0 in above:
            self.after_backward = _AfterBackward.follow(due, self.parameters[above.index(0)])
        for i in more:
            self.most[i], self.grew_at[i] = above[i], self.updates
        return [(self.parameters[i], 0) for i in settled]


@dataclass(eq=False, slots=True)
class _AfterBackward:
    """The counts of changes of a few gradients, the last one for comparison, as autograd has accumulated them."""

    parameters: list[Tensor]
    counts: dict[int, int | None] = field(default_factory=dict)
    hooks: list[RemovableHandle] = field(default_factory=list)

    @classmethod
    def follow(cls, due: list[Tensor], usual: Tensor) -> "_AfterBackward":
        """Have the counts noted in the backward passes up to `more`."""
        followed = cls([*due, usual])
        for place, parameter in enumerate(followed.parameters):
            if parameter.requires_grad and parameter.is_leaf:
                note = _note_in(followed.counts, place)
                followed.hooks.append(parameter.register_post_accumulate_grad_hook(note))
        return followed

    def more(self) -> list[tuple[Tensor, int]]:
        """Return which of them were written more often than the last since then, and how many times more."""
        for hook in self.hooks:
            hook.remove()
        after: list[int | None] = []
        for place, parameter in enumerate(self.parameters):
            now, before = _count_of(parameter), self.counts.get(place)
            after.append(None if now is None or before is None else now - before)
        usual = after[-1]
        if usual is None:
            return []
        pairs = zip(self.parameters[:-1], after[:-1], strict=True)
        return [(parameter, n - usual) for parameter, n in pairs if n is not None and n > usual]


def _note_in(counts: dict[int, int | None], place: int) -> Any:
    def note(parameter: Tensor) -> None:
        counts[place] = _count_of(parameter)

    return note


def _above_most(parameters: Iterable[Tensor], *, are_sharded: bool) -> list[int]:
    """Return how much larger each gradient's count is than the commonest one; that of no gradient is far below."""
    try:
        counts: list[Any] = list(map(_VERSION, parameters)) if not are_sharded else [_count_of(p) for p in parameters]
    except (AttributeError, RuntimeError):
        counts = [_count_of(p) for p in parameters]
    usual = Counter(c for c in counts if c is not None).most_common(1)
    least = -(2**31)
    return [least if c is None or not usual else c - usual[0][0] for c in counts]


def _count_of(parameter: Tensor) -> int | None:
    gradient = parameter.grad
    return None if gradient is None else version_of(getattr(gradient, "_local_tensor", gradient))
