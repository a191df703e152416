"""The difference of two tensors, by their values or by the facts recorded of them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

STATISTICS: Final = ("Max", "Min", "Mean", "Norm")

TOLERANCE: Final = {"float64": 1e-9, "float32": 1e-4, "float16": 1e-2, "bfloat16": 4e-2}
"""Relative error, by norm, above which two results differ. A rounding unit is 2^-24 of fp32, 2^-11 of fp16, 2^-8 of
bf16; sums over some thousand terms, taken in another order, lie within some ten of them, and fp32 results after kernels
with tensor cores or another algorithm within 1e-4."""

EXACT: Final = 0.0
"""Tolerance of whole numbers and bool."""


@dataclass(frozen=True)
class Difference:
    """The difference of two tensors, NaN where unknown. `relative` is ‖a − b‖ / ‖b‖, or that of the statistics."""

    relative: float
    cosine: float = math.nan
    max_absolute: float = math.nan
    max_relative: float = math.nan
    note: str = ""

    def exceeds_rounding(self, dtype: str) -> bool:
        """Whether the two are further apart than rounding explains."""
        return bool(self.note) or not self.relative <= tolerance_of(dtype)


def tolerance_of(dtype: str) -> float:
    """Return the relative error that rounding explains.

    >>> tolerance_of("torch.bfloat16")
    0.04
    """
    return TOLERANCE.get(dtype.rpartition(".")[2].lower(), EXACT)


def of_values(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> Difference:
    """Return the difference of two arrays of one shape, in float64; NaN and Inf at the same places are equal."""
    if a.shape != b.shape:
        return Difference(math.nan, note=f"shapes {list(a.shape)} and {list(b.shape)}")
    x, y = (np.asarray(v, np.complex128 if np.iscomplexobj(v) else np.float64).ravel() for v in (a, b))
    finite = np.isfinite(x) & np.isfinite(y)
    odd = ~finite
    if odd.any() and not np.array_equal(x[odd], y[odd], equal_nan=True):
        return Difference(math.inf, note="NaN or Inf at different places")
    x, y = x[finite], y[finite]
    if not x.size:
        return Difference(0.0, 1.0, 0.0, 0.0)
    apart = np.abs(x - y)
    norm_x, norm_y = float(np.linalg.norm(x)), float(np.linalg.norm(y))
    cosine = float(np.real(np.vdot(x, y)) / (norm_x * norm_y)) if norm_x and norm_y else float(norm_x == norm_y)
    distance = float(np.linalg.norm(apart))
    relative = distance / norm_y if norm_y else math.inf if distance else 0.0
    sizes = np.abs(y)
    each = np.divide(apart, sizes, out=np.where(apart > 0, np.inf, 0.0), where=sizes > 0)
    return Difference(relative, cosine, float(apart.max()), float(each.max()))


def of_facts(a: Mapping[str, Any], b: Mapping[str, Any]) -> Difference:
    """Return the difference of the facts of two tensors: shape, dtype, checksum, Max, Min, Mean and Norm."""
    if list(a.get("shape", [])) != list(b.get("shape", [])):
        return Difference(math.nan, note=f"shapes {a.get('shape')} and {b.get('shape')}")
    if a.get("md5") and b.get("md5"):
        same = a["md5"] == b["md5"]
        return Difference(0.0 if same else _of_statistics(a, b), note="" if same else "checksums differ")
    relative = _of_statistics(a, b)
    return Difference(relative, note="NaN or Inf in one of them" if math.isinf(relative) else "")


def _of_statistics(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    """Return the greatest difference of a statistic, by the size of the tensor's elements (its mean: their RMS)."""
    worst = 0.0
    numel = math.prod(n for n in b.get("shape", []) if isinstance(n, int)) or 1
    rms = _number(b.get("Norm")) / math.sqrt(numel)
    for key in STATISTICS:
        x, y = _number(a.get(key)), _number(b.get(key))
        if math.isnan(x) or math.isnan(y) or math.isinf(x) or math.isinf(y):
            if not (x == y or (math.isnan(x) and math.isnan(y))):
                return math.inf
            continue
        scale = max(abs(y), rms if math.isfinite(rms) else 0.0)
        worst = max(worst, abs(x - y) / scale if scale else math.inf if x != y else 0.0)
    return worst


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)
