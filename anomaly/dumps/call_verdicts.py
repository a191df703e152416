"""Verdicts on a call in two dumps, by the rules of msprobe 26.2's comparison: pass, warning or error.

msprobe compares statistics (`summary`), checksums (`md5`) or elements (`all`). The thresholds are msprobe's, so that
its users read the colours that they know; `dump_comparison` compares within rounding.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

PASS, WARNING, ERROR = "pass", "warning", "error"

CLOSE_INPUT, FAR_OUTPUT = 0.1, 0.5
"""Relative errors of norms: an output above the second is an error where all inputs are below the first."""

TIMES_INPUT: Final = 10.0
"""An output's relative error of the norm is a warning above this multiple of the inputs'."""

FROM_EXACT: Final = 0.1
"""The same limit where the inputs' norms are equal."""

SHARE_INPUT, SHARE_OUTPUT = 0.9, 0.1
"""Shares of elements within one thousandth: an output below the second is an error if no input is below the first."""

COSINE_INPUT, COSINE_LOSS = 0.9, 0.1
"""A cosine that falls by more than the second is a warning where the inputs' is above the first."""

_UNWRITTEN: Final = ("empty", "empty_like", "empty_strided", "empty_with_format", "new_empty", "new_empty_strided")
_UNCHECKED: Final = frozenset({*_UNWRITTEN, "numpy", "to", "__setitem__"})
"""Operations whose values are unwritten memory, or change by intention."""

_RESULT_ALONE: Final = frozenset({"_reduce_scatter_base", "_all_gather_base", "all_to_all_single", "batch_isend_irecv"})
"""Collectives that overwrite an argument."""

STATISTICS: Final = {
    "Max": ("Max diff", "MaxRelativeErr"),
    "Min": ("Min diff", "MinRelativeErr"),
    "Mean": ("Mean diff", "MeanRelativeErr"),
    "Norm": ("L2norm diff", "NormRelativeErr"),
}
"""Statistics, and the names of their difference and their relative error."""


@dataclass
class ValuePair:
    """A value of a call in both dumps: its facts (`b` is None where only the first has it), and what comes of it.

    `measures` are numbers by msprobe's names: relative errors as shares, cosine, shares of close elements.
    """

    is_output: bool
    a: Mapping[str, Any]
    b: Mapping[str, Any] | None
    measures: dict[str, Any] = field(default_factory=dict)
    status: str = PASS
    reasons: list[str] = field(default_factory=list)

    def blame(self, status: str, reason: str) -> None:
        """Note a reason for a warning or an error."""
        self.status = max(self.status, status, key=_ORDER.index)
        self.reasons.append(f"{status}: {reason}")


_ORDER: Final = (PASS, WARNING, ERROR)


def measure_statistics(a: Mapping[str, Any], b: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return differences and relative errors of the statistics of two values; None where a number has none.

    >>> measure_statistics({"Norm": 3.0}, {"Norm": 2.0})["NormRelativeErr"]
    0.5
    """
    found: dict[str, Any] = {}
    for key, (difference, relative) in STATISTICS.items():
        x, y = _number(a.get(key)), _number(b.get(key) if b is not None else None)
        apart = x - y if x is not None and y is not None else None
        found[difference] = apart
        found[relative] = abs(apart / y) if apart is not None and not math.isnan(apart) and y else None
    return found


def judge(call: str, pairs: Sequence[ValuePair], mode: str) -> str | None:
    """Judge the values of a call, note status and reasons in them, and return the worst status; None without values."""
    if not pairs:
        return None
    operation = call.split(".")[1] if "." in call else call
    if operation not in _UNCHECKED:
        checked = [pair for pair in pairs if pair.is_output or operation not in _RESULT_ALONE]
        if mode == "md5":
            for pair in checked:
                _check_sums(pair)
        else:
            for pair in checked:
                _check_facts(pair)
            if operation not in _RESULT_ALONE:
                _check_results(pairs, mode)
    return max((pair.status for pair in pairs), key=_ORDER.index)


def _check_sums(pair: ValuePair) -> None:
    a, b = (facts.get("md5") if facts is not None else None for facts in (pair.a, pair.b))
    if pair.b is None or (a != b and (not a or not b)):
        pair.blame(WARNING, "the other dump has no such value")
    elif a != b:
        pair.blame(ERROR, "the checksums differ")


def _check_facts(pair: ValuePair) -> None:
    """Check what one value says by itself: NaN and Inf, requires_grad, dtype, shape, and numbers beside tensors."""
    a, b = pair.a, pair.b
    if b is None:
        pair.blame(ERROR, "the other dump has no such value")
        return
    if not _is_odd(b) and _is_odd(a):
        pair.blame(ERROR, "NaN or Inf in the first dump alone")
    for key, name in (("requires_grad", "requires_grad"), ("dtype", "dtype"), ("shape", "shape")):
        if a.get(key) is not None and b.get(key) is not None and a[key] != b[key]:
            pair.blame(ERROR, f"{name} {a[key]} and {b[key]}")
    is_plain = all("class" in str(facts.get("dtype")) for facts in (a, b))
    if not pair.is_output and is_plain and a.get("Max") != b.get("Max"):
        pair.blame(ERROR, f"the arguments {a.get('Max')} and {b.get('Max')}")


def _check_results(pairs: Sequence[ValuePair], mode: str) -> None:
    """Check the results against the inputs: what goes wrong in this call, and not before it."""
    outputs = [pair for pair in pairs if pair.is_output]
    inputs = [pair for pair in pairs if not pair.is_output]
    if not outputs:
        return
    if mode == "all":
        share = [min(_all(of, "One Thousandth Err Ratio"), default=1.0) for of in (inputs, outputs)]
        if share[0] > SHARE_INPUT and share[1] < SHARE_OUTPUT:
            outputs[0].blame(ERROR, "the inputs' elements agree to one thousandth, the results' do not")
        cosine = [min(_all(of, "Cosine"), default=1.0) for of in (inputs, outputs)]
        if cosine[0] > COSINE_INPUT and cosine[0] - cosine[1] > COSINE_LOSS:
            outputs[0].blame(WARNING, f"the cosine falls from {cosine[0]:.3g} to {cosine[1]:.3g}")
        return
    into, out = (max(_all(of, "NormRelativeErr"), default=0.0) for of in (inputs, outputs))
    for pair in outputs if into < CLOSE_INPUT else ():
        error = pair.measures.get("NormRelativeErr")
        if error is not None and error > FAR_OUTPUT:
            pair.blame(ERROR, f"the norm is {error:.3g} of its size off, the inputs' at most {into:.3g}")
    if out > TIMES_INPUT * into if into else out > FROM_EXACT:
        outputs[0].blame(WARNING, f"the norm is {out:.3g} of its size off, the inputs' at most {into:.3g}")


def _all(pairs: Sequence[ValuePair], measure: str) -> list[float]:
    found = (pair.measures.get(measure) for pair in pairs)
    return [value for value in found if value is not None and not math.isnan(value)]


def _is_odd(facts: Mapping[str, Any]) -> bool:
    return any(isinstance(v := facts.get(key), float) and not math.isfinite(v) for key in ("Max", "Min"))


def _number(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
