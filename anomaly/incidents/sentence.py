"""Says in plain words what an anomaly and an incident are."""

from collections.abc import Sequence

from trainsentry.anomaly.anomaly import (
    COMMUNICATION_MISMATCH,
    DEAD,
    DRIFT,
    DUPLICATE_DATA,
    HANG,
    NONFINITE,
    OVERFLOW,
    REPLICA_MISMATCH,
    SHIFT,
    SPIKE,
    STRAGGLER,
    UNDERFLOW,
    Anomaly,
)
from trainsentry.anomaly.incidents.ranking import Ranked
from trainsentry.anomaly.incidents.rule_sentences import SAID
from trainsentry.anomaly.rules.constant_data import NAME as CONSTANT_DATA
from trainsentry.anomaly.rules.weight_continuity import NAME as CONTINUITY
from trainsentry.collectors.series import (
    ACTIVATION_GRAD_INPUT,
    ACTIVATION_INPUT,
    ACTIVATION_OUTPUT,
    COMMUNICATION_INPUT,
    COMMUNICATION_OUTPUT,
    GRADIENT,
    GRADIENT_UNREDUCED,
    PARAMETER,
    UPDATE,
)

_WHAT = {
    PARAMETER: "parameter {}",
    GRADIENT: "the gradient of {}",
    GRADIENT_UNREDUCED: "the gradient of {} before reduction",
    UPDATE: "the update of {}",
    COMMUNICATION_INPUT: "what goes into {}",
    COMMUNICATION_OUTPUT: "what comes out of {}",
    ACTIVATION_OUTPUT: "activation {}",
    ACTIVATION_INPUT: "activation {}",
    ACTIVATION_GRAD_INPUT: "the gradient at {}",
}


def subject(name: str, quantity: str) -> str:
    """Return what a series is called in a sentence.

    >>> subject("fc.weight", "gradient"), subject("fc.weight", "exp_avg"), subject("loss", "loss")
    ('the gradient of fc.weight', 'optimizer state exp_avg of fc.weight', 'loss')
    """
    if name == quantity:
        return name
    if quantity in {"data", "optimizer", "training"}:
        return f"{name} ({quantity})" if quantity == "data" else name
    return _WHAT.get(quantity, f"optimizer state {quantity} of {{}}").format(name)


def evidence(anomaly: Anomaly) -> str:
    """Return one sentence that says what is wrong with one series."""
    what = subject(anomaly.name, anomaly.quantity)
    since = f"; it was healthy at step {anomaly.last_clean}" if anomaly.last_clean >= 0 else ""
    passed = "; its inputs were abnormal already" if anomaly.passed_on and anomaly.detector != "all_at_once" else ""
    if anomaly.kind in _ACROSS_RANKS:
        return _ACROSS_RANKS[anomaly.kind](anomaly, what)
    if anomaly.kind in SAID:
        return SAID[anomaly.kind](anomaly, what) + since
    said = _hard if anomaly.kind in {NONFINITE, OVERFLOW} else _change
    return said(anomaly, what) + since + passed


def _hard(anomaly: Anomaly, what: str) -> str:
    if anomaly.kind == NONFINITE:
        number = f"{anomaly.value:.0f}"
        kind = {"nans": "NaN", "infs": "Inf"}.get(anomaly.statistic, "non-finite")
        values = "value" if number == "1" else "values"
        return f"{what} holds {number} {kind} {values} at step {anomaly.step}"
    return (
        f"{what} reaches {anomaly.value:.3g} at step {anomaly.step}, past {anomaly.expected:.3g}, from where "
        "its dtype is about to overflow"
    )


def _change(anomaly: Anomaly, what: str) -> str:
    if anomaly.detector == "all_at_once":
        return f"{_all_of(anomaly)} at once are {anomaly.value:.3g} times as large as usual at step {anomaly.step}"
    if anomaly.detector == CONSTANT_DATA:
        return f"every element of {what} is {anomaly.value:.6g} at step {anomaly.step}, and they differed before"
    if anomaly.detector == CONTINUITY:
        return (
            f"something else than its update has changed {what} before step {anomaly.step}: the mean of its elements "
            f"is {anomaly.value:.6g}, and was to be {anomaly.expected:.6g}"
        )
    if anomaly.kind not in _CHANGES:
        return f"{what} is abnormal at step {anomaly.step} ({anomaly.kind})"
    if anomaly.statistic in _SHARES:
        usual = f"{anomaly.expected:.3g}"
        return (
            f"{_SHARES[anomaly.statistic]} of {what} is {anomaly.value:.3g} at step {anomaly.step}, and usually {usual}"
        )
    statistic = _STATISTICS.get(anomaly.statistic, anomaly.statistic)
    of = "" if anomaly.name == anomaly.quantity else f"the {statistic} of "
    slowly = ", and changes slowly" if anomaly.kind == DRIFT else ""
    times = f"{anomaly.value / anomaly.expected:.3g} times " if anomaly.expected > 0 else "beside "
    return f"{of}{what} is {anomaly.value:.3g} at step {anomaly.step}, {times}its usual {anomaly.expected:.3g}{slowly}"


_CHANGES = frozenset({SPIKE, SHIFT, DRIFT, DEAD, UNDERFLOW})
_SHARES = {"zeros": "the share of zeros", "mean": "the mean ÷ root mean square"}
_STATISTICS = {"max": "largest magnitude", "rms": "root mean square"}


def _all_of(anomaly: Anomaly) -> str:
    return {GRADIENT: "all gradients", UPDATE: "all updates"}.get(anomaly.quantity, f"all of {anomaly.quantity}")


def _parted(anomaly: Anomaly, what: str) -> str:
    equal = f"; all were equal at step {anomaly.last_clean}"
    if anomaly.statistic == CONTINUITY:
        return (
            f"{what} differs between ranks at step {anomaly.step}, and on rank {anomaly.rank} something else than its "
            f"update has changed it{equal}"
        )
    if anomaly.value == anomaly.expected:
        return (
            f"{what} differs between ranks at step {anomaly.step}, and as many have rank {anomaly.rank}'s bits as "
            f"others: a tie, so which is right cannot be told from this{equal}"
        )
    ranks = "rank has" if anomaly.expected == 1 else "ranks have"
    return (
        f"{what} on rank {anomaly.rank} has other bits at step {anomaly.step} than its replicas, of which "
        f"{anomaly.expected:.0f} {ranks} the same{equal}"
    )


def _not_conserved(anomaly: Anomaly, what: str) -> str:
    if anomaly.statistic == "factor":
        return (
            f"the reduced gradients at step {anomaly.step} are {anomaly.value:.3g} times the mean of the ranks' own, "
            f"and were {anomaly.expected:.3g} times at most so far: summed for averaged?"
        )
    if anomaly.statistic == "reduction":
        tie = ", as many as with the others" if anomaly.value == anomaly.expected else ""
        return (
            f"rank {anomaly.rank} calls {anomaly.name} with another reduction than other ranks at step {anomaly.step} "
            f"({anomaly.value:.0f} with this one{tie}): it is at another call than they are"
        )
    if anomaly.statistic == "order":
        tie = ", as many as with the others" if anomaly.value == anomaly.expected else ""
        return (
            f"rank {anomaly.rank} has called other collectives than other ranks in step {anomaly.step}, or in another "
            f"order ({anomaly.value:.0f} with this one{tie})"
        )
    return (
        f"{what} does not follow from what the ranks put in at step {anomaly.step}: its elements add up to "
        f"{anomaly.value:.6g} on rank {anomaly.rank}, and should to {anomaly.expected:.6g}"
    )


def _duplicate(anomaly: Anomaly, _what: str) -> str:
    if anomaly.statistic == "batch":
        return (
            f"since step {anomaly.last_clean + 1} the data goes round a few old batches: that of step "
            f"{anomaly.value:.0f} is served a third time at step {anomaly.step}"
        )
    return (
        f"rank {anomaly.rank} trains on the same data as rank {anomaly.value:.0f}, up to step {anomaly.step}: their "
        "inputs are equal to the bit, batch after batch"
    )


def _straggler(anomaly: Anomaly, _what: str) -> str:
    return (
        f"rank {anomaly.rank} is slow: its own work takes {anomaly.value:.3g} s a step at step {anomaly.step}, "
        f"{anomaly.value / max(anomaly.expected, 1e-9):.3g} times the others', who wait for it"
    )


def _hang(anomaly: Anomaly, _what: str) -> str:
    if anomaly.statistic == "sequence":
        return (
            f"rank {anomaly.rank} is missing in step {anomaly.step}: others wait for it in number "
            f"{anomaly.value:.0f} of {anomaly.name}; hang.json and hang_stacks.txt of each rank say where it is"
        )
    return (
        f"step {anomaly.step} does not end, for {anomaly.value:.0f} s so far; hang.json and hang_stacks.txt of each "
        "rank say where it is"
    )


_ACROSS_RANKS = {
    HANG: _hang,
    REPLICA_MISMATCH: _parted,
    COMMUNICATION_MISMATCH: _not_conserved,
    DUPLICATE_DATA: _duplicate,
    STRAGGLER: _straggler,
}


def summary(ranked: Sequence[Ranked], *, activations_seen: bool = True) -> str:
    """Return the sentence of an incident: what came first, since when, and what followed.

    `activations_seen` says whether activations were sampled since the trouble began.
    """
    first = ranked[0]
    clean = first.anomaly.last_clean
    when = f"Since step {first.onset}"
    if 0 <= clean < first.onset - 1:
        when = f"Between step {clean + 1} and step {first.onset}"
    since = f"{when} on rank {first.anomaly.rank}: " + evidence(first.anomaly)
    others = len(ranked) - 1
    is_scalar = first.anomaly.name == first.anomaly.quantity and first.anomaly.kind not in _ACROSS_RANKS
    if is_scalar and not activations_seen:
        since += "; what made it so was not sampled (activations are not sampled at every step)"
    if not others:
        return since + ". Nothing else is abnormal."
    followed: dict[str, int] = {}
    for item in ranked[1:]:
        followed[item.anomaly.quantity] = followed.get(item.anomaly.quantity, 0) + 1
    groups = ", ".join(f"{count} × {quantity}" for quantity, count in followed.items())
    verb = "series is" if others == 1 else "series are"
    return since + f". {others} other {verb} abnormal beside it so far ({groups})."
