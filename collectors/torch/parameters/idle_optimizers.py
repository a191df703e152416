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

RESTS: Final = 200
"""Rounds without a step after which an optimizer is idle: a critic that is too good for its generator rests, too."""


class IdleOptimizers:
    """Appends `stopped_writes.<parameter>`, with the steps since, for an optimizer that is stepped no more.

    Several optimizers take turns, a critic five and its generator one, or an actor after rollouts. A round ends where
    an optimizer steps for the second time in it. One that was stepped in many rounds and rests for longer than ever is
    idle, if gradients of its parameters are computed all the same, and no other optimizer holds them.
    """

    def __init__(self, rows: StepRows, optimized: OptimizedParameters) -> None:
        self.rows = rows
        self.optimized = optimized
        self._ids: tuple[int, ...] = ()
        self._round: set[int] = set()
        self._stopped = StoppedWrites(0, RESTS)
        self._resting: dict[int, tuple[int, list[_Gradient]]] = {}  # of each, the step since, and the gradients then

    def note(self, optimizer: Optimizer, optimizers: Sequence[Optimizer], step: int) -> None:
        """Take in an update that is about to be made; call it at each, with all optimizers of the run."""
        if id(optimizer) not in self._round:
            self._round.add(id(optimizer))
            return
        ids = tuple(map(id, optimizers))
        if ids != self._ids:
            self._ids, self._stopped = ids, StoppedWrites(len(ids), RESTS)
            self._resting.clear()
        self._tell(optimizers, step)
        stepped = [int(i in self._round) for i in ids]
        for place, since in self._stopped.after(stepped, step).items():
            self._resting[place] = since, [_Gradient(n) for n in self._alone(place, optimizers)]
        self._round = {id(optimizer)}

    def _tell(self, optimizers: Sequence[Optimizer], step: int) -> None:
        """Tell of the optimizers that rested at the round before, where their gradients have moved since."""
        for place, (since, gradients) in self._resting.items():
            moved = [gradient.named for gradient in gradients if gradient.has_moved]
            if id(optimizers[place]) not in self._round and len(moved) > SHARE_WITH_GRADIENT * len(gradients):
                for named in moved[:SHOWN]:
                    name = f"{STOPPED_WRITES}.{named.name}"
                    series = Series(name, name, module=named.module, scalar=True)
                    self.rows.add_scalar(self.rows.table.series_id(series), float(step - since))
        self._resting.clear()

    def _alone(self, place: int, optimizers: Sequence[Optimizer]) -> list[NamedParameter]:
        """Return the parameters that train and that this optimizer alone holds."""
        others = {id(n.parameter) for i, o in enumerate(optimizers) if i != place for n in self.optimized.owned("", o)}
        own = self.optimized.owned("", optimizers[place])
        return [n for n in own if n.parameter.requires_grad and id(n.parameter) not in others]


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
