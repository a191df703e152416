"""The sentences of anomalies and the summary of an incident, in plain words."""

from collections.abc import Sequence
from typing import Final

from trainsentry.anomaly.across_ranks.common_numbers import TIE, CommonNumbersRule
from trainsentry.anomaly.anomaly import (
    ALL_AT_ONCE,
    CHECKPOINT_MISMATCH,
    DEAD,
    DRIFT,
    DTYPE_CHANGE,
    MEDIAN,
    MODE_CHANGE,
    OPTION_CHANGE,
    SHIFT,
    SPIKE,
    STATE_RESET,
    UNDERFLOW,
    UPDATE_SIZE,
    Anomaly,
)
from trainsentry.anomaly.incidents.ranking import Ranked
from trainsentry.anomaly.rules.data.batch_rows import BatchRowsRule
from trainsentry.anomaly.rules.registry import detector, speaker_for
from trainsentry.collectors.series import (
    ACTIVATION_GRAD_INPUT,
    ACTIVATION_GRAD_OUTPUT,
    ACTIVATION_INPUT,
    ACTIVATION_OUTPUT,
    BUFFER,
    COMMUNICATION_INPUT,
    COMMUNICATION_OUTPUT,
    GRADIENT,
    GRADIENT_UNREDUCED,
    PARAMETER,
    UPDATE,
)

_SUBJECTS = {
    PARAMETER: "parameter {}",
    BUFFER: "buffer {}",
    GRADIENT: "the gradient of {}",
    GRADIENT_UNREDUCED: "the gradient of {} before reduction",
    UPDATE: "the update of {}",
    COMMUNICATION_INPUT: "the input of {}",
    COMMUNICATION_OUTPUT: "the output of {}",
    ACTIVATION_OUTPUT: "activation {}",
    ACTIVATION_INPUT: "activation {}",
    ACTIVATION_GRAD_INPUT: "the gradient at {}",
    ACTIVATION_GRAD_OUTPUT: "the gradient at {}",
}

EVENTS = frozenset({SPIKE, OPTION_CHANGE, MODE_CHANGE, DTYPE_CHANGE, STATE_RESET, CHECKPOINT_MISMATCH})
"""Kinds of what happens at one step; all others last, until somebody mends them."""

_CHANGES = frozenset({SPIKE, SHIFT, DRIFT, DEAD, UNDERFLOW, UPDATE_SIZE})
_SHARES = {"zeros": "the share of zeros", "mean": "the mean ÷ root mean square"}
_STATISTICS = {"max": "largest magnitude", "rms": "root mean square"}
_GROUPS = {GRADIENT: "gradients", UPDATE: "updates"}

SLOW: Final = 2.0
"""Factor up to which a drift is called slow: sums of small changes are told before; what is farther away has leapt."""


MOST_DIGITS: Final = 9
"""Digits from which on two numbers are shown alike."""

NO_SHARE: Final = 1e-6
"""Share of zeros that is none: what an average over many steps keeps of a single one."""


def subject(name: str, quantity: str) -> str:
    """Return the words for a series in a sentence.

    >>> subject("fc.weight", "gradient"), subject("fc.weight", "exp_avg"), subject("loss", "loss")
    ('the gradient of fc.weight', 'optimizer state exp_avg of fc.weight', 'loss')
    """
    if name == quantity:
        return name
    if quantity in {"data", "optimizer", "training"}:
        return f"{name} ({quantity})" if quantity == "data" else name
    return _SUBJECTS.get(quantity, f"optimizer state {quantity} of {{}}").format(name)


def evidence(anomaly: Anomaly, onset: int | None = None) -> str:
    """Return one sentence on an anomaly: that of its rule, or that of the baselines.

    It began at step `onset`, without one when it was found. A slow change passes for healthy for some steps: those from
    the onset on are not called so.
    """
    known = detector(anomaly.detector)
    if known is None and anomaly.detector != ALL_AT_ONCE and anomaly.kind not in _CHANGES:
        known = speaker_for(anomaly.kind)  # a user's own function
    words = subject(anomaly.name, anomaly.quantity)
    said = _change(anomaly, words) if known is None else known.sentence(anomaly, words)
    if known is not None and known.compares_ranks:
        return said  # its last healthy step is that of all ranks
    if 0 <= anomaly.last_clean < (anomaly.step if onset is None else onset):
        said += f"; it was last healthy at step {anomaly.last_clean}"
    passed_on = anomaly.passed_on and anomaly.detector != ALL_AT_ONCE
    return said + ("; what it is computed from was abnormal already" if passed_on else "")


def _change(anomaly: Anomaly, words: str) -> str:
    """Return the sentence of the baselines, and of a user's own detector."""
    value, expected = _told_apart(anomaly.value, anomaly.expected)
    if anomaly.detector == ALL_AT_ONCE:
        group = _GROUPS.get(anomaly.quantity, anomaly.quantity)
        if anomaly.statistic == MEDIAN:
            return f"most {group} have left their usual sizes at step {anomaly.step}, by factors around {value}"
        return f"all {group} together are {value} times as large as usual at step {anomaly.step}"
    if anomaly.kind not in _CHANGES:
        return f"{words} is abnormal at step {anomaly.step} ({anomaly.kind}: {anomaly.statistic} {value})"
    if anomaly.statistic in _SHARES:
        usual = expected if anomaly.expected > NO_SHARE else "0"
        return f"{_SHARES[anomaly.statistic]} of {words} is {value} at step {anomaly.step}, usually {usual}"
    statistic = _STATISTICS.get(anomaly.statistic, anomaly.statistic)
    of = "" if anomaly.name == anomaly.quantity else f"the {statistic} of "
    slowly = ", and changes slowly" if anomaly.kind == DRIFT and _is_near(anomaly) else ""
    times = f"{anomaly.value / anomaly.expected:.3g} times" if anomaly.expected > 0 else "instead of"
    return f"{of}{words} is {value} at step {anomaly.step}, {times} its usual {expected}{slowly}"


def _told_apart(value: float, expected: float) -> tuple[str, str]:
    """Return two numbers as texts of three digits, or of as many as tell them apart.

    >>> _told_apart(12.34, 1.0), _told_apart(1.0, 0.99996)
    (('12.3', '1'), ('1', '0.99996'))
    """
    for digits in range(3, MOST_DIGITS):
        texts = f"{value:.{digits}g}", f"{expected:.{digits}g}"
        if texts[0] != texts[1]:
            break
    return texts


def _is_near(anomaly: Anomaly) -> bool:
    return anomaly.expected > 0 and 1 / SLOW < anomaly.value / anomaly.expected < SLOW


def _where(anomaly: Anomaly) -> str:
    """Return on which rank an anomaly is; nothing for a tie of ranks of which any may be wrong."""
    known, is_settled = detector(anomaly.detector), detector(anomaly.statistic) is not None
    is_tie = known is not None and known.leaves_ties and anomaly.value == anomaly.expected
    is_tie |= known is CommonNumbersRule and anomaly.statistic == TIE
    return "" if is_tie and not is_settled else f" on rank {anomaly.rank}"


def summary(ranked: Sequence[Ranked], *, activations_seen: bool = True) -> str:
    """Return the summary of an incident: the first suspect, since when, and what followed.

    `activations_seen`: activations were sampled since the trouble began.
    """
    first = ranked[0]
    clean = first.anomaly.last_clean
    when = f"{'At' if _is_event(first) else 'Since'} step {first.onset}"
    if 0 <= clean < first.onset - 1:
        when = f"Between step {clean + 1} and step {first.onset}"
    said = f"{when}{_where(first.anomaly)}: " + evidence(first.anomaly, first.onset)
    if _is_own_scalar(first.anomaly) and not activations_seen:
        said += "; its cause was not sampled (activations are not sampled at every step)"
    others = len(ranked) - 1
    if not others:
        return said + ". Nothing else is abnormal."
    followed: dict[str, int] = {}
    for item in ranked[1:]:
        followed[item.anomaly.quantity] = followed.get(item.anomaly.quantity, 0) + 1
    groups = ", ".join(f"{count} × {quantity}" for quantity, count in followed.items())
    series = "1 other series is" if others == 1 else f"{others} other series are"
    return said + f". {series} also abnormal so far ({groups})."


def returned(again: Sequence[int], returns: int) -> str:
    """Return the words for the steps at which an incident came back; `again` are the newest of them.

    >>> returned((1510,), 1), returned((1510, 1590), 2)
    (' Again at step 1510.', ' Again at steps 1510, 1590.')
    >>> returned((1510, 1590), 17)
    ' Again 17 times, last at steps 1510, 1590.'
    """
    if not again:
        return ""
    steps = f"{'step' if len(again) == 1 else 'steps'} {', '.join(map(str, again))}"
    return f" Again at {steps}." if returns <= len(again) else f" Again {returns} times, last at {steps}."


def _is_event(first: Ranked) -> bool:
    anomaly = first.anomaly
    return first.onset == anomaly.step and (anomaly.kind in EVENTS or anomaly.detector == BatchRowsRule.name)


def _is_own_scalar(anomaly: Anomaly) -> bool:
    """Whether the anomaly is in a logged scalar, and no comparison of ranks found it."""
    known = detector(anomaly.detector)
    return anomaly.name == anomaly.quantity and not (known is not None and known.compares_ranks)
