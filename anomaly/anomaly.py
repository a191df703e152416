"""An anomaly: one series at one step, judged abnormal by one detector; and the protocol of detectors."""

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final, Protocol

NONFINITE: Final = "nonfinite"
OVERFLOW: Final = "overflow"
SPIKE: Final = "spike"
REPLICA_MISMATCH: Final = "replica_mismatch"
COMMUNICATION_MISMATCH: Final = "communication_mismatch"
DUPLICATE_DATA: Final = "duplicate_data"
STRAGGLER: Final = "straggler"
HANG: Final = "hang"
CHECKPOINT_MISMATCH: Final = "checkpoint_mismatch"
SHIFT: Final = "shift"
DRIFT: Final = "drift"
DEAD: Final = "dead"
UNDERFLOW: Final = "underflow"
FROZEN: Final = "frozen"
UPDATE_SIZE: Final = "update_size"
STATE_RESET: Final = "state_reset"
MODE_CHANGE: Final = "mode_change"
DTYPE_CHANGE: Final = "dtype_change"
OPTION_CHANGE: Final = "option_change"
GRADIENT_FLOW: Final = "gradient_flow"
PRECISION: Final = "precision"
STALE: Final = "stale"
ARITHMETIC: Final = "arithmetic"
RECURRENCE: Final = "recurrence"
LOSS_SCALE_COLLAPSE: Final = "loss_scale_collapse"

LARGEST: Final = 1 << 53
"""The largest whole number accepted from a line: beyond it, float64 rounds whole numbers."""

CERTAIN: Final = frozenset({NONFINITE, OVERFLOW, REPLICA_MISMATCH, COMMUNICATION_MISMATCH, HANG})
"""Kinds of the rules without a history: the value is wrong whatever came before."""

SPIKES: Final = "spike"
DRIFTS: Final = "drift"
LEVEL_SHIFTS: Final = "level_shift"
ALL_AT_ONCE: Final = "all_at_once"
"""Detectors that compare a series with its own past: sudden changes, slow ones, small ones that stay, and those of a
whole group."""

UNUSED: Final = "unused"
"""The statistic of a parameter that never moved, where no gradient came to the output of its module either: nothing
that the loss depends on uses it, as the pooler of an encoder whose tokens are averaged."""

MEDIAN: Final = "median"
"""The statistic of a change of a whole group whose members changed by different factors: the middle one."""


@dataclass(frozen=True, slots=True)
class Anomaly:
    """One line of `anomalies.jsonl`.

    `expected` is the normal value (a median, a bound, 0 for counts); `score` grows with the strength of
    the evidence. `last_clean` is the last step at which the series was healthy, -1 for never: the trouble began
    between it and `step`. `passed_on`: the inputs of the series were abnormal already. `alarm`: it opens an incident;
    without, it joins an open incident or remains a suspicion.
    """

    step: int
    micro_step: int
    rank: int
    order: int
    name: str
    quantity: str
    statistic: str
    value: float
    expected: float
    score: float
    detector: str
    kind: str
    module: str = ""
    last_clean: int = -1
    passed_on: bool = False
    alarm: bool = True

    def to_json(self) -> dict[str, Any]:
        """Return plain data; numbers that JSON does not know become null."""
        return {f.name: json_number(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Anomaly":
        """Rebuild an anomaly from a line.

        Raises:
            KeyError: when a key without a default is missing.
            TypeError, ValueError: when a value has another type, or is too large.

        """
        values = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        for key in _NUMBERS:
            values[key] = math.nan if data[key] is None else data[key]
        for key, value in values.items():
            kind = _KINDS[key]
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise TypeError(f"{key}: a {type(value).__name__}, expected {_EXPECTED[kind]}")
            if isinstance(value, int) and abs(value) > LARGEST:
                raise ValueError(f"{key}: beyond {LARGEST}")
        return cls(**values | {key: float(values[key]) for key in _NUMBERS})


class Detector(Protocol):
    """A rule, of one rank or across ranks: its name in files, its sentence, and how its anomalies are treated.

    `name` is the `detector` of its anomalies. `compares_ranks`: it needs the records of several ranks, so the tables of
    one rank cannot reproduce its anomalies. `leaves_ties`: where `value` equals `expected`, its anomalies name every
    rank of a tie. `settles_ties`: its anomalies show which rank of such a tie is at fault. `speaks_for`: the kind whose
    sentence a user's own function gets from this rule.
    """

    name: ClassVar[str]
    compares_ranks: ClassVar[bool] = False
    leaves_ties: ClassVar[bool] = False
    settles_ties: ClassVar[bool] = False
    speaks_for: ClassVar[str | None] = None

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str, /) -> str:
        """Return a sentence on the fault, with its step and number; `subject` names the series in words."""
        ...


_WHOLE: Final = ("step", "micro_step", "rank", "order", "last_clean")
_NUMBERS: Final = ("value", "expected", "score")
_KINDS: Final[dict[str, Any]] = {
    **dict.fromkeys((f.name for f in fields(Anomaly)), str),
    **dict.fromkeys(_WHOLE, int),
    **dict.fromkeys(_NUMBERS, (int, float)),
    **dict.fromkeys(("passed_on", "alarm"), bool),
}
_EXPECTED: Final[dict[Any, str]] = {
    int: "a whole number",
    (int, float): "a number",
    str: "a text",
    bool: "true or false",
}


def json_number(value: Any) -> Any:
    """Return `value`, or None for a float that is not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
