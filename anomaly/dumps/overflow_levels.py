"""Levels of overflow of a dumped call, by the rules of msprobe 26.2's graph (`overflow_check`).

They tell where NaN and Inf come from in a picture of all calls; `first_overflow` finds the first one of many ranks.
"""

import math
from collections.abc import Mapping
from typing import Any, Final

MEDIUM, HIGH, CRITICAL = "medium", "high", "critical"

LARGEST_GROWTH: Final = 100.0
"""Norm of the largest result by that of the largest input above which a call counts as high."""

_UNWRITTEN: Final = frozenset({"torch.empty", "torch.empty_like", "torch.empty_strided"})
"""Operations whose result holds whatever the memory held."""

_OVERWRITTEN: Final = {
    "distributed.recv": "tensor",
    "distributed.all_gather": "",
    "distributed.reduce_scatter": "output",
    "distributed._reduce_scatter_base": "",
    "distributed.all_gather_into_tensor": "",
    "distributed.reduce_scatter_tensor": "",
    "tensor.masked_fill_": "",
}
"""Operations whose first argument, or the one of this name, is overwritten, so that NaN in it means nothing."""


def overflow_level(call: str, entry: Any) -> str | None:
    """Return the level of a call's entry in dump.json; None where it has no overflow.

    critical: a result has NaN or Inf and no input has; high: both have, or the norm grows a hundredfold; medium: an
    input has and no result has. Parameters are no inputs of a module.

    >>> bad, good = {"Max": math.inf, "Min": 0.0}, {"Max": 1.0, "Min": 0.0}
    >>> overflow_level("Torch.exp.0.forward", {"input_args": [good], "output": [bad]})
    'critical'
    """
    if not isinstance(entry, dict):
        return None
    arguments = _listed(entry.get("input_args", entry.get("input")))
    named = entry.get("input_kwargs")
    named = named if isinstance(named, dict) else {}
    results = _listed(entry.get("output"))
    level = _level(any(map(_is_bad, [*arguments, *named.values()])), any(map(_is_bad, results)))
    if level is None and _growth([*arguments, *named.values()], results) > LARGEST_GROWTH:
        level = HIGH
    return None if level is not None and _means_nothing(call, arguments, named, results) else level


def _level(into: bool, out: bool) -> str | None:
    if out:
        return HIGH if into else CRITICAL
    return MEDIUM if into else None


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_bad(value: Any) -> bool:
    """Return whether a statistic of a tensor, or of one in a list, is NaN or Inf."""
    if isinstance(value, list):
        return any(map(_is_bad, value))
    if not isinstance(value, Mapping):
        return False
    return any(str(value.get(key)).lower() in {"nan", "inf", "-inf"} for key in ("Max", "Min", "Mean"))


def _growth(inputs: list[Any], results: list[Any]) -> float:
    """Return the largest result's norm by the largest input's, or the result's alone where all inputs are zero."""
    into, out = ([_norm(v) for v in values if not math.isnan(_norm(v))] for values in (inputs, results))
    if not into or not out:
        return 0.0
    return max(out) / max(into) if max(into) else max(out)


def _norm(value: Any) -> float:
    found = value.get("Norm") if isinstance(value, Mapping) and "dtype" in value else None
    return float(found) if isinstance(found, (int, float)) else math.nan


def _means_nothing(call: str, arguments: list[Any], named: Mapping[str, Any], results: list[Any]) -> bool:
    operation = ".".join(call.split(".")[:2]).lower()
    if operation in _UNWRITTEN:
        return not any(map(_is_bad, results[1:]))
    if operation not in _OVERWRITTEN:
        return False
    others = [value for key, value in named.items() if key != _OVERWRITTEN[operation]]
    checked = arguments[1:] + (others if _OVERWRITTEN[operation] else [])
    return not any(map(_is_bad, checked))
