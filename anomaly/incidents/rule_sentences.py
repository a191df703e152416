"""What invariants say in plain words: of an anomaly, and of what it is called."""

import math

from trainsentry.anomaly.anomaly import (
    DTYPE_CHANGE,
    FROZEN,
    LOSS_SCALE_COLLAPSE,
    MODE_CHANGE,
    STATE_RESET,
    UPDATE_SIZE,
    Anomaly,
)


def _frozen(anomaly: Anomaly, what: str) -> str:
    if anomaly.name == "all":
        return f"the optimizer updates nothing at step {anomaly.step}"
    never = "has never moved" if anomaly.last_clean < 0 else "is zero or missing"
    return f"{what} {never} at step {anomaly.step}, while it has no reason to stand still"


def _state_lost(anomaly: Anomaly, what: str) -> str:
    if anomaly.statistic == "min":
        return f"{what} is negative at step {anomaly.step}: {anomaly.value:.3g}, where squares are averaged"
    if math.isnan(anomaly.value):
        return f"{what} is gone at step {anomaly.step}"
    if anomaly.statistic == "value":
        return (
            f"the optimizer has taken {anomaly.value:.0f} steps with {anomaly.name} at step {anomaly.step}, and "
            f"{anomaly.expected:.0f} were due: its state was lost"
        )
    return (
        f"the norm of {what} is {anomaly.value:.3g} at step {anomaly.step}, below {anomaly.expected:.3g}, to which its "
        "decay alone could bring it: it was lost"
    )


def _mode(anomaly: Anomaly, _what: str) -> str:
    mode = "training" if anomaly.value else "evaluation"
    return f"{anomaly.name} was switched to {mode} mode, as seen at step {anomaly.step}"


def _dtype(anomaly: Anomaly, what: str) -> str:
    return f"{what} changes its dtype at step {anomaly.step}: {anomaly.statistic}"


def _collapse(anomaly: Anomaly, _what: str) -> str:
    skipped = f"{anomaly.value:.0f} of the last 30 steps"
    return f"the loss scaler has skipped {skipped} at step {anomaly.step}: its scale collapses"


def _rate(anomaly: Anomaly, what: str) -> str:
    if anomaly.detector == "all_at_once":
        return f"all updates at once are {anomaly.value:.3g} times as large as usual at step {anomaly.step}"
    times = f"{anomaly.value / anomaly.expected:.3g} times" if anomaly.expected > 0 else "above"
    return f"{what} is {anomaly.value:.3g} at step {anomaly.step}, {times} the largest before"


SAID = {
    FROZEN: _frozen,
    STATE_RESET: _state_lost,
    MODE_CHANGE: _mode,
    DTYPE_CHANGE: _dtype,
    LOSS_SCALE_COLLAPSE: _collapse,
    UPDATE_SIZE: _rate,
}
