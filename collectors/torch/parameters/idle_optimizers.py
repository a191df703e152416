"""Finds an optimizer that is stepped no more beside others that are, although its parameters get gradients."""

import weakref
from collections.abc import Sequence
from typing import Final

from torch import Tensor
from torch.optim import Optimizer

from trainsentry.collectors.series import STOPPED_WRITES, Series
from trainsentry.collectors.torch.parameters.gradient_reader import gradient_of
from trainsentry.collectors.torch.parameters.gradients import OptimizedParameters
from trainsentry.collectors.torch.parameters.stopped_writes import StoppedWrites
from trainsentry.collectors.torch.rows.local_tensor import version_of
from trainsentry.collectors.torch.rows.step_rows import StepRows
from trainsentry.collectors.torch.sharding.local_shards import NamedParameter

SHOWN: Final = 4
"""Parameters of an idle optimizer that have a row."""

SHARE_WITH_GRADIENT: Final = 0.5
"""Least share of them whose gradients are computed anew between two rounds: those of a stage that has ended stay."""


class IdleOptimizers:
    """Appends `stopped_writes.<parameter>`, with the steps since, for an optimizer that is stepped no more.

    Several optimizers take turns, a critic five and its generator one, or an actor after rollouts. A round ends where
    an optimizer steps for the second time in it. One that was stepped in many rounds and rests for longer than ever is
    idle, if gradients of its parameters are computed all the same.
    """

    def __init__(self, rows: StepRows, optimized: OptimizedParameters) -> None:
        self.rows = rows
        self.optimized = optimized
        self.steps = 0
        self._stepped_at: dict[int, int] = {}
        self._ids: tuple[int, ...] = ()
        self._round: set[int] = set()
        self._stopped = StoppedWrites(0)
        self._resting: dict[int, list[_Gradient]] = {}  # the gradients of each as it was found to rest

    def note(self, optimizer: Optimizer, optimizers: Sequence[Optimizer]) -> None:
        """Take in an update that is about to be made; call it at each, with all optimizers of the run."""
        self._stepped_at[id(optimizer)] = self.steps
        if id(optimizer) not in self._round:
            self._round.add(id(optimizer))
            return
        ids = tuple(map(id, optimizers))
        if ids != self._ids:
            self._ids, self._stopped = ids, StoppedWrites(len(ids))
            self._resting.clear()
        self._tell(optimizers)
        stepped = [int(i in self._round) for i in ids]
        for place in self._stopped.after(stepped):
            self._resting[place] = [_Gradient(n) for n in self._owned(optimizers[place])]
        self._round = {id(optimizer)}

    def _tell(self, optimizers: Sequence[Optimizer]) -> None:
        """Tell of the optimizers that rested at the round before, where their gradients have moved since."""
        for place, gradients in self._resting.items():
            since = self.steps - self._stepped_at[id(optimizers[place])] - 1
            moved = [gradient.named for gradient in gradients if gradient.has_moved]
            if id(optimizers[place]) not in self._round and len(moved) > SHARE_WITH_GRADIENT * len(gradients):
                for named in moved[:SHOWN]:
                    name = f"{STOPPED_WRITES}.{named.name}"
                    series = Series(name, name, module=named.module, scalar=True)
                    self.rows.add_scalar(self.rows.table.series_id(series), float(since))
        self._resting.clear()

    def _owned(self, optimizer: Optimizer) -> list[NamedParameter]:
        return self.optimized.owned("", optimizer)


class _Gradient:
    """The gradient of a parameter at some time; another one may have taken its place since."""

    def __init__(self, named: NamedParameter) -> None:
        self.named = named
        gradient = gradient_of(named.parameter)
        self.then = None if gradient is None else weakref.ref(gradient)
        self.version = _version(gradient)

    @property
    def has_moved(self) -> bool:
        """Whether a gradient was computed since."""
        now = gradient_of(self.named.parameter)
        if now is None:
            return False
        return self.then is None or self.then() is not now or _version(now) != self.version


def _version(gradient: Tensor | None) -> int | None:
    return None if gradient is None else version_of(gradient)
