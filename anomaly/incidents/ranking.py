"""Ranks anomalies that belong together: what came first, and is not explained by something before it."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from trainsentry.anomaly.across_ranks.replicas import NAME as REPLICAS
from trainsentry.anomaly.anomaly import HARD, MODE_CHANGE, Anomaly
from trainsentry.anomaly.rules.weight_continuity import NAME as CONTINUITY
from trainsentry.collectors.series import GRADIENT, PARAMETER, TENSOR_QUANTITIES

EVERYWHERE: Final = 0.5
"""Share of the parameters from which on a trouble is everywhere: an update by bad gradients hits all of them,
a fault in memory hits one."""

DRIFTS: Final = "drift"
SLOW_STEPS: Final = 8
"""Steps within which changes that the cumulative test finds are one: it needs some ten to notice one."""

FEW: Final = 3
"""So few anomalous parameters are never called everywhere, however small the model."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """An anomaly with its place in the order of causes: `onset` is the step at which it can have begun."""

    anomaly: Anomaly
    onset: int
    held: bool

    @property
    def key(self) -> tuple[int, bool, bool, bool, float, int]:
        """The order of causes.

        By step; then what was not passed on; then what was there before the forward pass, the strongest first; then
        what is wrong whatever came before; then execution order; of ranks that are alike in all of this the lowest,
        whichever was heard first.
        """
        first = -self.anomaly.score if self.held else float(self.anomaly.order)
        soft = self.anomaly.kind not in HARD
        return self.onset, self.anomaly.passed_on, not self.held, soft, first, self.anomaly.rank


def rank(anomalies: Iterable[Anomaly], parameters: int) -> list[Ranked]:
    """Return the first anomaly of each series, of several at one step the strongest, most likely cause first.

    `parameters` is how many parameters the model has.

    Weights and optimizer state are read seldom and act before they are read: one that was last seen healthy
    before the trouble began can have caused it, unless an update by bad gradients explains it. Such an update
    hits all weights; so when many are abnormal after gradients were, they are counted as its effect.
    """
    firsts: dict[tuple[int, str, str, int], Anomaly] = {}
    for anomaly in _without_ties(list(anomalies)):
        key = (anomaly.rank, anomaly.name, anomaly.quantity, anomaly.micro_step)
        known = firsts.get(key)
        if known is None or strength(anomaly) < strength(known):
            firsts[key] = anomaly
    candidates = list(firsts.values())
    if not candidates:
        return []
    began = min(a.step for a in candidates)
    effects = _Effects.of(candidates, parameters)
    drifts = min((a.step for a in candidates if a.detector == DRIFTS), default=0)
    return sorted((_place(_together(a, drifts), began, effects) for a in candidates), key=lambda r: r.key)


def _without_ties(anomalies: list[Anomaly]) -> list[Anomaly]:
    """Settle ties of replicas by the weight's own continuity: of a rank it names, and of those that it does not name.

    The first get `statistic` "continuity", the others count as passed on.
    """
    changed = {(a.name, a.step, a.rank) for a in anomalies if a.detector == CONTINUITY}
    named = {(name, step) for name, step, _ in changed}
    settled = []
    for a in anomalies:
        is_tie = a.detector == REPLICAS and a.value == a.expected and (a.name, a.step) in named
        if is_tie and (a.name, a.step, a.rank) in changed:
            settled.append(replace(a, statistic=CONTINUITY))
        else:
            settled.append(replace(a, passed_on=True) if is_tie else a)
    return settled


def strength(anomaly: Anomaly) -> tuple[int, bool, float]:
    """Return what the anomalies of one series go by: the earliest, then what is wrong whatever came before."""
    return anomaly.step, anomaly.kind not in HARD, -anomaly.score


def _together(anomaly: Anomaly, drifts: int) -> Anomaly:
    """Return an anomaly; of slow changes the first to be noticed is not the first to begin, so that they are one."""
    slow = anomaly.detector == DRIFTS and anomaly.step <= drifts + SLOW_STEPS
    return replace(anomaly, step=drifts) if slow else anomaly


@dataclass(frozen=True)
class _Effects:
    """What bad updates explain, by rank: since when gradients are bad, and whether weights are bad everywhere."""

    bad_gradients_since: dict[int, int]
    everywhere: frozenset[int]

    @classmethod
    def of(cls, candidates: list[Anomaly], parameters: int) -> "_Effects":
        since: dict[int, int] = {}
        weights: Counter[int] = Counter()
        for anomaly in candidates:
            if anomaly.quantity == GRADIENT:
                since[anomaly.rank] = min(since.get(anomaly.rank, anomaly.step), anomaly.step)
            weights[anomaly.rank] += anomaly.quantity == PARAMETER
        bound = max(FEW, EVERYWHERE * parameters)
        return cls(since, frozenset(rank for rank, count in weights.items() if count > bound))

    def explain(self, anomaly: Anomaly) -> bool:
        """Whether an earlier update by bad gradients explains an abnormal weight or state."""
        since = self.bad_gradients_since.get(anomaly.rank)
        if since is None or since >= anomaly.step:
            return False
        # State is a running sum of gradients: bad gradients make it bad.
        return anomaly.quantity != PARAMETER or anomaly.rank in self.everywhere


def _place(anomaly: Anomaly, began: int, effects: _Effects) -> Ranked:
    is_scalar = anomaly.name == anomaly.quantity
    is_state = anomaly.quantity not in TENSOR_QUANTITIES and not is_scalar
    if anomaly.kind == MODE_CHANGE:
        return Ranked(anomaly, anomaly.step, held=True)
    if (anomaly.quantity != PARAMETER and not is_state) or effects.explain(anomaly):
        return Ranked(anomaly, anomaly.step, held=False)
    onset = began if anomaly.last_clean < began else anomaly.step
    return Ranked(anomaly, onset, held=anomaly.quantity == PARAMETER)
