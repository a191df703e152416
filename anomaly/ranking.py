"""Ranks anomalies that belong together: what came first, and is not explained by something before it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from trainsentry.anomaly.anomaly import Anomaly
from trainsentry.collectors.series import GRADIENT, PARAMETER, TENSOR_QUANTITIES

EVERYWHERE: Final = 0.5
"""Share of the parameters from which on a trouble is everywhere: an update by bad gradients hits all of them,
a fault in memory hits one."""

FEW: Final = 3
"""So few anomalous parameters are never called everywhere, however small the model."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """An anomaly with its place in the order of causes: `onset` is the step at which it can have begun."""

    anomaly: Anomaly
    onset: int
    held: bool

    @property
    def key(self) -> tuple[int, bool, bool, float]:
        """The order of causes.

        By step; then what was not passed on; then what was there before the forward pass, the strongest first;
        then execution order.
        """
        first = -self.anomaly.score if self.held else float(self.anomaly.order)
        return self.onset, self.anomaly.passed_on, not self.held, first


def rank(anomalies: Iterable[Anomaly], parameters: int) -> list[Ranked]:
    """Return the first anomaly of each series, most likely cause first.

    `parameters` is how many parameters the model has.

    Weights and optimizer state are read seldom and act before they are read: one that was last seen healthy
    before the trouble began can have caused it, unless an update by bad gradients explains it. Such an update
    hits all weights; so when many are abnormal after gradients were, they are counted as its effect.
    """
    firsts: dict[tuple[int, str, str, int], Anomaly] = {}
    for anomaly in anomalies:
        key = (anomaly.rank, anomaly.name, anomaly.quantity, anomaly.micro_step)
        known = firsts.get(key)
        if known is None or anomaly.step < known.step:
            firsts[key] = anomaly
    candidates = list(firsts.values())
    if not candidates:
        return []
    began = min(a.step for a in candidates)
    ranked = [_place(a, candidates, began, parameters) for a in candidates]
    return sorted(ranked, key=lambda r: r.key)


def _place(anomaly: Anomaly, candidates: list[Anomaly], began: int, parameters: int) -> Ranked:
    is_scalar = anomaly.name == anomaly.quantity
    is_state = anomaly.quantity not in TENSOR_QUANTITIES and not is_scalar
    if anomaly.quantity != PARAMETER and not is_state:
        return Ranked(anomaly, anomaly.step, held=False)
    if _explained_by_update(anomaly, candidates, parameters):
        return Ranked(anomaly, anomaly.step, held=False)
    onset = began if anomaly.last_clean < began else anomaly.step
    return Ranked(anomaly, onset, held=anomaly.quantity == PARAMETER)


def _explained_by_update(anomaly: Anomaly, candidates: list[Anomaly], parameters: int) -> bool:
    """Whether an earlier update by bad gradients explains an abnormal weight or state."""
    earlier = [a for a in candidates if a.quantity == GRADIENT and a.rank == anomaly.rank and a.step < anomaly.step]
    if not earlier:
        return False
    if anomaly.quantity != PARAMETER:
        return True  # state is a running sum of gradients: bad gradients make it bad
    peers = {a.name for a in candidates if a.quantity == PARAMETER and a.rank == anomaly.rank}
    return len(peers) > max(FEW, EVERYWHERE * parameters)
