"""Describes values for a dump, in the format of msprobe's MindSpore debugger."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import mindspore as ms
import numpy as np
from mindspore import Tensor

from trainsentry.collectors.mindspore.rows.tensor_statistics import array_of, row_of
from trainsentry.collectors.statistics import INFS, MAX, MEAN, MIN, NANS, NORM

DTYPES: Final = tuple({type(kind) for kind in (ms.float32, ms.bfloat16, ms.int32, ms.uint8, ms.bool_, ms.complex64)})
"""The classes of MindSpore's dtypes."""


def facts_of(tensor: Tensor) -> dict[str, Any]:
    """Return type, dtype, shape, Max, Min, Mean and Norm of a tensor."""
    facts: dict[str, Any] = {
        "type": "mindspore.Tensor",
        "dtype": str(tensor.dtype),
        "shape": [int(n) for n in tensor.shape],
        "Max": None,
        "Min": None,
        "Mean": None,
        "Norm": None,
    }
    if not tensor.size:
        return facts
    if str(tensor.dtype) == "Bool":
        array = array_of(tensor)
        return {**facts, "Max": bool(array.any()), "Min": bool(array.all())}
    row = row_of(tensor, 0.0)
    if row[NANS] or row[INFS]:
        infinite = math.nan if row[NANS] else math.inf
        array = array_of(tensor)
        with np.errstate(invalid="ignore"):
            facts.update(Max=float(np.max(array)), Min=float(np.min(array)), Mean=float(np.mean(array)), Norm=infinite)
        finite = {"Max_except_inf_nan": row[MAX], "Min_except_inf_nan": row[MIN]}
        return {**facts, **{key: None if math.isnan(value) else float(value) for key, value in finite.items()}}
    return {**facts, "Max": float(row[MAX]), "Min": float(row[MIN]), "Mean": float(row[MEAN]), "Norm": float(row[NORM])}


def described(value: Any, path: str, take: Callable[[Tensor, str], Any], depth: int = 0) -> Any:
    """Return the description of a value; `take(tensor, path)` describes the tensors in it."""
    if isinstance(value, Tensor):
        return take(value, path)
    if depth < 8 and isinstance(value, Mapping):
        return {str(key): described(item, _join(path, key), take, depth + 1) for key, item in value.items()}
    if depth < 8 and isinstance(value, (tuple, list)):
        return [described(item, _join(path, i), take, depth + 1) for i, item in enumerate(value)]
    return _plain(value)


def _plain(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, slice):
        return {"type": "slice", "value": [value.start, value.stop, value.step]}
    if isinstance(value, DTYPES):
        return {"type": "mindspore.dtype", "value": str(value)}
    known = isinstance(value, (bool, int, float, str))
    return {"type": type(value).__name__, "value": value if known else None}


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def is_finite(value: Any) -> bool:
    """Return whether all values of the tensors in a description are finite."""
    if isinstance(value, dict):
        if "Norm" in value:
            return not isinstance(value["Norm"], float) or math.isfinite(value["Norm"])
        return all(is_finite(item) for item in value.values())
    return all(is_finite(item) for item in value) if isinstance(value, list) else True
