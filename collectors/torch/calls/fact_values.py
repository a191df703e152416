"""Fills a tensor's statistics into its description, in msprobe's format."""

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from trainsentry.collectors.statistics import INFS, MAX, MEAN, MIN, NANS, NORM

KEYS: Final = ("Max", "Min", "Mean", "Norm")

NUMPY_INTEGERS: Final = frozenset(
    {
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    }
)
"""Integer dtypes that NumPy has too."""


def is_integral(tensor: Tensor) -> bool:
    """Whether a tensor holds integers or truth values."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def fill(facts: dict[str, Any], row: Sequence[float]) -> None:
    """Fill in the statistics of a row."""
    facts["Max"], facts["Min"] = row[MAX], row[MIN]
    facts["Mean"], facts["Norm"] = row[MEAN], row[NORM]
    if facts["dtype"].startswith("torch.complex"):
        facts["Norm"] = None
    if row[NANS] or row[INFS]:
        facts["Max_except_inf_nan"], facts["Min_except_inf_nan"] = row[MAX], row[MIN]
        infinite = math.nan if row[NANS] else math.inf
        facts["Max"] = facts["Norm"] = infinite
        facts["Min"] = facts["Mean"] = math.nan if row[NANS] else row[MIN]


def fill_non_finite(facts: dict[str, Any], tensor: Tensor, row: Any) -> None:
    """Fill in the results of plain reductions, which may be NaN or Inf, and the extremes of the finite values."""
    wide = tensor.abs() if tensor.is_complex() else tensor.float()
    facts.update(Max=wide.max().item(), Min=wide.min().item(), Mean=wide.mean().item(), Norm=wide.norm().item())
    for key, column in (("Max_except_inf_nan", MAX), ("Min_except_inf_nan", MIN)):
        facts[key] = None if math.isnan(row[column]) else float(row[column])


def fill_integral(facts: dict[str, Any], low: int, high: int) -> None:
    """Fill in the extremes of integers or truth values."""
    as_written = bool if facts["dtype"] == "torch.bool" else int
    facts["Max"], facts["Min"] = as_written(high), as_written(low)
    if not facts["shape"]:
        facts["Mean"] = facts["Norm"] = facts["Max"]
