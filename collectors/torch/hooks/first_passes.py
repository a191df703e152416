"""Counts backward passes until the first step is recorded, so that a loop whose steps go unseen is told."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from trainsentry.collectors.guard import Guard, InertWhenCopied

PART: Final = "first passes"

TOLD_EVERY: Final = 20
"""Backward passes without a step after which the listener is told, and again after as many more."""

MOST_PARAMETERS: Final = 4
"""Parameters that are hooked, spread over the model: a pass seldom leaves all of them out."""


class FirstPasses:
    """Calls `told(passes)` at each `TOLD_EVERY` backward passes, until `close`.

    A hook on a parameter costs a call for each of its gradients; `close` removes them at the first recorded step.
    """

    def __init__(self, guard: Guard, parameters: Iterable[nn.Parameter], told: Callable[[int], None]) -> None:
        self.guard = guard
        self.told = told
        self._passes: Counter[int] = Counter()
        self._told_at = 0
        trained = [p for p in parameters if p.requires_grad and p.is_leaf and _is_made(p)]
        chosen = trained[:: max(1, len(trained) // MOST_PARAMETERS)][:MOST_PARAMETERS]
        self._handles = [p.register_post_accumulate_grad_hook(_Passed(self, i)) for i, p in enumerate(chosen)]

    def note(self, place: int) -> None:
        """Count a gradient of one of the hooked parameters; the most frequent one counts the passes."""
        self._passes[place] += 1
        if self._passes[place] == self._told_at + TOLD_EVERY:
            self._told_at += TOLD_EVERY
            self.told(self._told_at)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _is_made(parameter: nn.Parameter) -> bool:
    return not isinstance(parameter, nn.parameter.UninitializedParameter)


@dataclass(frozen=True, slots=True)
class _Passed(InertWhenCopied):
    owner: FirstPasses
    place: int

    def __call__(self, parameter: Tensor) -> None:
        if torch.compiler.is_compiling():
            return
        self.owner.guard.run(PART, self.owner.note, self.place)
