"""Whether an optimizer still has the state it had: asked at every step, for the price of a length."""

import weakref

from torch.optim import Optimizer

from trainsentry.collectors.torch.parameters import state_of


class StateEntries:
    """Remembers for how many parameters each optimizer had state when its last update ended."""

    def __init__(self) -> None:
        self._after_update: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    def updated(self, optimizer: Optimizer) -> None:
        """Take what an optimizer has after its update as what it is to have before the next."""
        self._after_update[optimizer] = len(state_of(optimizer))

    def are_fewer(self, optimizer: Optimizer) -> bool:
        """Whether state has gone since the last update: cleared, or loaded from where there was none."""
        return len(state_of(optimizer)) < self._after_update.get(optimizer, 0)
