"""Ranks anomalies that belong together: first the earliest that no other anomaly explains."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from trainsentry.anomaly.anomaly import (
    CERTAIN,
    DEAD,
    DRIFTS,
    DTYPE_CHANGE,
    FROZEN,
    LARGEST,
    MODE_CHANGE,
    OPTION_CHANGE,
    PRECISION,
    REPLICA_MISMATCH,
    UNDERFLOW,
    Anomaly,
)
from trainsentry.anomaly.finding import ALL, DATA
from trainsentry.anomaly.rules.buffers.buffer_writes import BufferWritesRule
from trainsentry.anomaly.rules.buffers.constant_buffer import ConstantBufferRule
from trainsentry.anomaly.rules.data.constant_data import ConstantDataRule
from trainsentry.anomaly.rules.data.missing_input import MissingInputRule
from trainsentry.anomaly.rules.data.repeated_samples import RepeatedSamplesRule
from trainsentry.anomaly.rules.operations import OperationsRule
from trainsentry.anomaly.rules.optimizer.frozen import HELD, IN_MODEL
from trainsentry.anomaly.rules.optimizer.weight_continuity import WRITES
from trainsentry.anomaly.rules.registry import detectors
from trainsentry.anomaly.rules.zero_pattern import ZeroPatternRule
from trainsentry.anomaly.series_facts import BACKWARD
from trainsentry.collectors.series import (
    ACTIVATION_GRAD_OUTPUT,
    ACTIVATION_INPUT,
    ACTIVATION_OUTPUT,
    GRADIENT,
    PARAMETER,
    TENSOR_QUANTITIES,
    UPDATE,
)

EVERYWHERE: Final = 0.5
"""Share of abnormal parameters above which the trouble is everywhere: an update by bad gradients changes all of them,
faulty memory changes one."""

SLOW_STEPS: Final = 8
"""Steps within which the drifts of several series begin together: the cumulative sum needs some ten to find one."""

OPTIMIZER: Final = "optimizer"
"""The quantity of a finding on an optimizer's options."""

OUTGROWS: Final = 10.0
"""Factor by which one gradient is beyond its usual size where it makes clipping shrink all others."""

SAME_FACTOR: Final = 1.5
"""Factor within which gradients are off alike: the usual size of each is known to its own swing only."""

SET_BY_OTHERS: Final = frozenset({ConstantBufferRule.name, BufferWritesRule.name})
"""Detectors of buffers to which neither an update nor a pass has written."""

TOO_SMALL: Final = frozenset({DEAD, UNDERFLOW})
"""Kinds of gradients that move nothing."""

WEIGHT_GRADIENTS: Final = frozenset({GRADIENT, "grad_norm"})
"""Gradients of weights, and their norm as a loop logs it."""

FEW: Final = 3
"""Abnormal parameters that are never everywhere, however small the model."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """An anomaly with its place in the order of causes.

    `onset` is the earliest step at which it can have begun. `precedes`: it was there before the forward pass, or before
    the backward pass where nothing else of the forward pass was read.
    """

    anomaly: Anomaly
    onset: int
    precedes: bool

    @property
    def key(self) -> tuple[int, bool, bool, bool, float, int]:
        """The order of causes.

        By onset; then anomalies that are not passed on; then those from before the backward pass, of weights and
        switches the strongest first; then the certain kinds; then execution order; then the lowest rank, whichever
        reported first.
        """
        is_computed = not self.precedes or self.anomaly.quantity in {ACTIVATION_INPUT, ACTIVATION_OUTPUT}
        first = float(self.anomaly.order) if is_computed else -self.anomaly.score
        uncertain = self.anomaly.kind not in CERTAIN
        return self.onset, self.anomaly.passed_on, not self.precedes, uncertain, first, self.anomaly.rank


def rank(anomalies: Iterable[Anomaly], parameters: int) -> list[Ranked]:
    """Return the first anomaly of each series, the strongest of several at one step; most likely cause first.

    `parameters` is the number of parameters of the model.

    Weights and optimizer state are read seldom and act before they are read: one that was last healthy
    before the trouble began can be its cause, unless an update by bad gradients explains it. Such an update
    changes all weights; so many abnormal weights after abnormal gradients count as its effect. So does one weight
    that differs between ranks after its gradient did. A gradient that vanishes moves nothing: an activation that is
    next read after it, and was last healthy before, can be its cause too. So can a dead output where gradients inside
    its module vanished, whatever others did.
    """
    firsts: dict[tuple[int, str, str, int], Anomaly] = {}
    for anomaly in _without_scaled(_without_clipped(_without_writes(_without_ties(list(anomalies))))):
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
    return sorted((_place(a, _step_of(a, drifts), began, effects) for a in candidates), key=lambda r: r.key)


def _without_ties(anomalies: list[Anomaly]) -> list[Anomaly]:
    """Settle ties between ranks by the anomalies of a detector that settles them.

    The anomaly of the rank that such a detector names gets the detector's name as its `statistic`; the others count as
    passed on.
    """
    settling = {d.name for d in detectors() if d.settles_ties}
    tying = {d.name for d in detectors() if d.leaves_ties}
    at_fault = {(a.name, a.step, a.rank): a.detector for a in anomalies if a.detector in settling}
    named = {(name, step) for name, step, _ in at_fault}
    settled = []
    for a in anomalies:
        is_tie = a.detector in tying and a.value == a.expected and (a.name, a.step) in named
        settled_by = at_fault.get((a.name, a.step, a.rank))
        if is_tie and settled_by is not None:
            settled.append(replace(a, statistic=settled_by))
        else:
            settled.append(replace(a, passed_on=True) if is_tie else a)
    return settled


def _without_writes(anomalies: list[Anomaly]) -> list[Anomaly]:
    """Leave out a suspicion that a weight was written to where an alarm of the same step says what became of it."""
    told = {
        (a.rank, a.name, a.step)
        for a in anomalies
        if a.alarm and (a.quantity == PARAMETER or (a.kind, a.quantity) == (FROZEN, UPDATE))
    }
    return [a for a in anomalies if a.alarm or a.statistic != WRITES or (a.rank, a.name, a.step) not in told]


def _without_clipped(anomalies: list[Anomaly]) -> list[Anomaly]:
    """Count a fall of all gradients as passed on where one of them outgrew the others: clipping divides all by it."""
    outgrown = {
        (a.step, a.rank)
        for a in anomalies
        if a.quantity == GRADIENT and a.name != ALL and abs(a.value) > OUTGROWS * abs(a.expected) > 0
    }
    return [
        replace(a, passed_on=True)
        if a.quantity == GRADIENT and a.name == ALL and a.value < a.expected and (a.step, a.rank) in outgrown
        else a
        for a in anomalies
    ]


def _without_scaled(anomalies: list[Anomaly]) -> list[Anomaly]:
    """Count gradients as passed on that are off by the factor of all, where nothing else is off otherwise.

    That is where those at the model's output are off so, as the loss alone decides what these are: no module has
    computed them. And it is where all that are abnormal are weights' gradients, or their logged norm, and off so. Of a
    rank whose gradients are not said to be off, as of another stage of a pipeline, it is that by the factor of others.
    """
    everywhere = {
        (a.step, a.rank): a.value / a.expected
        for a in anomalies
        if a.quantity == GRADIENT and a.name == ALL and a.expected > 0
    }
    if not everywhere:
        return anomalies
    factors = {(a.step, a.rank): _factor_of(a, everywhere) for a in anomalies}
    scaled = {
        (a.step, a.rank)
        for a in anomalies
        if a.quantity == ACTIVATION_GRAD_OUTPUT and not a.module and _is_off_by(a, everywhere.get((a.step, a.rank)))
    }
    others = [a for a in anomalies if a.name != ALL]
    is_alike = [a.quantity in WEIGHT_GRADIENTS and _is_off_by(a, factors[a.step, a.rank]) for a in others]
    alike = Counter(
        (a.step, a.rank) for a, is_so in zip(others, is_alike, strict=True) if is_so and a.quantity == GRADIENT
    )
    apart = {(a.step, a.rank) for a, is_so in zip(others, is_alike, strict=True) if not is_so}
    scaled |= {at for at, count in alike.items() if at not in apart and (count >= FEW or at not in everywhere)}
    return [
        replace(a, passed_on=True)
        if a.quantity in BACKWARD
        and a.name != ALL
        and (a.step, a.rank) in scaled
        and _is_off_by(a, factors[a.step, a.rank])
        else a
        for a in anomalies
    ]


def _factor_of(anomaly: Anomaly, everywhere: Mapping[tuple[int, int], float]) -> float | None:
    """Return the factor of all gradients of an anomaly's rank at its step, or else of other ranks, if they agree."""
    own = everywhere.get((anomaly.step, anomaly.rank))
    of_others = [factor for (step, _), factor in everywhere.items() if step == anomaly.step]
    agree = bool(of_others) and max(of_others) <= SAME_FACTOR * min(of_others)
    return own if own is not None or not agree else of_others[0]


def _is_off_by(anomaly: Anomaly, factor: float | None) -> bool:
    if factor is None or factor <= 0 or not anomaly.expected:
        return False
    ratio = abs(anomaly.value / anomaly.expected)
    return factor / SAME_FACTOR <= ratio <= factor * SAME_FACTOR


def strength(anomaly: Anomaly) -> tuple[int, bool, bool, bool, float]:
    """Return the sort key of one series' anomalies: the earliest, the certain, alarms, what is dead, the strongest."""
    return anomaly.step, anomaly.kind not in CERTAIN, not anomaly.alarm, anomaly.kind != DEAD, -anomaly.score


def _step_of(anomaly: Anomaly, drifts: int) -> int:
    """Return when an anomaly began; for a drift that of the first one, as the first to be found need not begin so."""
    slow = anomaly.detector == DRIFTS and anomaly.step <= drifts + SLOW_STEPS
    return drifts if slow else anomaly.step


@dataclass(frozen=True)
class _Effects:
    """The effects of bad updates by rank: the first step with bad gradients, and whether weights are bad everywhere.

    `unequal_since` is the first step at which a gradient of a name differed between ranks. `vanished` are the ranks
    whose first bad gradients were all too small, `vanishing` the names of those that were, by rank. `options_since` is
    the first step with a bad option of an optimizer. `unused_since` is the step since which updates are missing of a
    module, by rank and name, whose output is another. `with_set_buffers` are the ranks of which something has set a
    buffer.
    """

    bad_gradients_since: dict[int, int]
    everywhere: frozenset[int]
    unequal_since: dict[str, int]
    vanished: frozenset[int]
    vanishing: frozenset[tuple[int, str]]
    options_since: dict[int, int]
    unused_since: dict[tuple[int, str], int]
    with_set_buffers: frozenset[int]

    @classmethod
    def of(cls, candidates: list[Anomaly], parameters: int) -> "_Effects":
        gradients = sorted((a for a in candidates if a.quantity == GRADIENT), key=lambda a: a.step)
        since: dict[int, int] = {}
        unequal: dict[str, int] = {}
        for anomaly in gradients:
            since.setdefault(anomaly.rank, anomaly.step)
            if anomaly.kind == REPLICA_MISMATCH:
                unequal.setdefault(anomaly.name, anomaly.step)
        weights = Counter(a.rank for a in candidates if a.quantity == PARAMETER)
        bound = max(FEW, EVERYWHERE * parameters)
        first = [a for a in gradients if a.step == since[a.rank]]
        others = {a.rank for a in first if a.kind not in TOO_SMALL}
        vanishing = frozenset((a.rank, a.name) for a in first if a.kind in TOO_SMALL)
        everywhere = frozenset(rank for rank, count in weights.items() if count > bound)
        options: dict[int, int] = {}
        for anomaly in sorted((a for a in candidates if a.quantity == OPTIMIZER), key=lambda a: a.step):
            options.setdefault(anomaly.rank, anomaly.step)
        vanished = frozenset(since.keys() - others)
        buffers = frozenset(a.rank for a in candidates if a.detector in SET_BY_OTHERS)
        return cls(since, everywhere, unequal, vanished, vanishing, options, _unused_modules(candidates), buffers)

    def tell(self, anomaly: Anomaly) -> bool:
        """Whether values say more than other operations do: a mask may be a buffer, which was set.

        Operations that have not been others for some passes yet say less than any value.
        """
        return not anomaly.alarm or anomaly.rank in self.with_set_buffers

    def may_come_of(self, anomaly: Anomaly) -> bool:
        """Whether an output can have made the first bad gradients: all vanished, or those inside its module did."""
        if anomaly.rank in self.vanished:
            return True
        inside = f"{anomaly.module}."
        return anomaly.kind == DEAD and any(
            rank == anomaly.rank and name.startswith(inside) for rank, name in self.vanishing
        )

    def explain(self, anomaly: Anomaly, step: int) -> bool:
        """Whether an earlier update by bad gradients explains a weight or state that is abnormal since a step."""
        if anomaly.kind == REPLICA_MISMATCH and self.unequal_since.get(anomaly.name, step) < step:
            return True
        if self.options_since.get(anomaly.rank, step) < step:  # a rate that is wrong moves weights too far
            return True
        if anomaly.kind == REPLICA_MISMATCH and min(self.options_since.values(), default=step) < step:
            return True  # a tie may be told of another rank than the one with the wrong rate
        since = self.bad_gradients_since.get(anomaly.rank)
        if since is None or since >= step:
            return False
        # State is a running sum of gradients: bad gradients make it bad.
        return anomaly.quantity != PARAMETER or anomaly.rank in self.everywhere


def _is_missing_update(anomaly: Anomaly) -> bool:
    return (anomaly.kind, anomaly.quantity) == (FROZEN, UPDATE)


def _module_of(anomaly: Anomaly) -> tuple[int, str]:
    """Return the rank and the module of an anomaly; that of an update may be known by its name alone."""
    return anomaly.rank, anomaly.name.rpartition(".")[0] if anomaly.quantity == UPDATE else anomaly.module


def _unused_modules(anomalies: list[Anomaly]) -> dict[tuple[int, str], int]:
    """Return the modules whose updates are missing since a step, and whose output is another since.

    Such a module was left out, or uses its weights no more, so no gradient reaches them. Where a weight is merely
    frozen, nothing of the forward pass changes.
    """
    missing = {_module_of(a): a.step for a in anomalies if _is_missing_update(a)}
    outputs = [a for a in anomalies if a.quantity == ACTIVATION_OUTPUT and not a.passed_on and _module_of(a) in missing]
    return {_module_of(a): missing[_module_of(a)] for a in outputs if a.last_clean < missing[_module_of(a)] <= a.step}


def _is_changed_by_code(anomaly: Anomaly) -> bool:
    """Whether nothing that training does changes an activation or its data so.

    That is another dtype, other operations, rounded values, a mask that masks no more, copies within a batch, or an
    input that is given no more.
    """
    if anomaly.detector == ZeroPatternRule.name:
        return anomaly.value == 0
    if anomaly.detector in {RepeatedSamplesRule.name, OperationsRule.name, MissingInputRule.name}:
        return True
    return anomaly.kind in {DTYPE_CHANGE, PRECISION} and anomaly.quantity == ACTIVATION_OUTPUT


def _is_blank(anomaly: Anomaly) -> bool:
    """Whether an anomaly says that an input of the model is zeros alone."""
    all_are_zero = (anomaly.statistic, anomaly.value) == ("zeros", 1.0)
    is_constant = anomaly.detector == ConstantDataRule.name and anomaly.value == 0
    return anomaly.quantity == DATA and (all_are_zero or is_constant)


def _place_unused(anomaly: Anomaly, step: int, since: int) -> Ranked:
    """Return the place of a missing update, or of an output, of a module that is not used since a step."""
    if anomaly.quantity == ACTIVATION_OUTPUT and not anomaly.passed_on:
        return Ranked(anomaly, since, precedes=since < step)
    return Ranked(replace(anomaly, passed_on=True), step, precedes=False)


def _place_changed(anomaly: Anomaly, step: int, began: int, effects: _Effects) -> Ranked:
    """Return the place of what only code changes: ahead of all else, unless it is operations, and values say more."""
    if anomaly.detector == OperationsRule.name:
        if effects.tell(anomaly):
            return Ranked(replace(anomaly, order=LARGEST), step, precedes=False)
        anomaly = replace(anomaly, order=-1)  # ahead of all that the pass computes
    return Ranked(anomaly, began if anomaly.last_clean < began else step, precedes=True)


def _place(anomaly: Anomaly, step: int, began: int, effects: _Effects) -> Ranked:
    is_scalar = anomaly.name == anomaly.quantity
    is_state = anomaly.quantity not in TENSOR_QUANTITIES and not is_scalar
    is_switch = anomaly.kind == MODE_CHANGE or (anomaly.kind, anomaly.quantity) == (OPTION_CHANGE, "training")
    is_replaced = anomaly.statistic in {HELD, IN_MODEL}
    # Somebody set it, a mode, a number, another weight, or gave zeros alone.
    if is_switch or is_replaced or _is_blank(anomaly):
        return Ranked(anomaly, step, precedes=True)
    unused = effects.unused_since.get(_module_of(anomaly), step + 1)
    if unused <= step and (_is_missing_update(anomaly) or anomaly.quantity == ACTIVATION_OUTPUT):
        return _place_unused(anomaly, step, unused)
    if _is_changed_by_code(anomaly):
        return _place_changed(anomaly, step, began, effects)
    if anomaly.quantity == ACTIVATION_OUTPUT and effects.may_come_of(anomaly):
        began = effects.bad_gradients_since[anomaly.rank]
        is_cause = anomaly.last_clean < began < step
        return Ranked(anomaly, began if is_cause else step, precedes=is_cause)
    is_set = anomaly.detector in SET_BY_OTHERS
    is_explained = not is_set and effects.explain(anomaly, step)
    if (anomaly.quantity != PARAMETER and not is_state and not is_set) or is_explained:
        return Ranked(anomaly, step, precedes=False)
    onset = began if anomaly.last_clean < began else step
    return Ranked(anomaly, onset, precedes=anomaly.quantity == PARAMETER or is_set)
