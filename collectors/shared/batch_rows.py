"""What is known of the rows of a batch: a few numbers of each."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

NOT_FINITE, LOW, HIGH, MEAN, ROOT = range(5)

PART: Final = "part"
"""Last word of the name of an input of which only the first samples are read."""

KEPT_STEPS: Final = 4
"""Steps whose inputs are kept: an incident is known one or two steps after its own, on a busy machine some more."""

KEPT_BYTES: Final = 64 * 2**20
"""Most memory of the host that kept inputs hold."""

DEVICE_BYTES: Final = 16 * 2**20
"""Most memory of devices that they hold; older steps go first."""

MOST_ELEMENTS: Final = 2**24
"""Elements of an input that are looked at, 0.1 s of a core; of a larger one the beginning of each row."""


@dataclass(frozen=True, slots=True)
class InputRows:
    """The rows of one input of the model.

    `rows`, shape (n, 5): how many values are not finite, and min, max, mean and root mean square of the rest.
    `elements` are those of a row.
    """

    name: str
    micro_step: int
    elements: int
    floating: bool
    rows: npt.NDArray[np.float64]


def rows_of_array(array: npt.NDArray[Any]) -> tuple[npt.NDArray[np.float64], int] | None:
    """Return the numbers of each row, as in `InputRows`, and the elements of a row; None for an array without rows.

    −Inf stands in masks by design, and counts as finite nowhere and as bad nowhere.
    """
    if array.ndim < 1 or not array.size:
        return None
    flat = (np.abs(array) if array.dtype.kind == "c" else array).reshape(len(array), -1)
    elements = flat.shape[1]
    flat = flat[:, : max(1, MOST_ELEMENTS // len(flat))].astype(np.float64)
    finite = np.isfinite(flat)
    kept = np.where(finite, flat, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        count = finite.sum(1)
        mean, root = kept.sum(1) / count, np.sqrt(np.square(kept).sum(1) / count)
    low, high = np.where(finite, flat, np.inf).min(1), np.where(finite, flat, -np.inf).max(1)
    return np.stack(((np.isnan(flat) | np.isposinf(flat)).sum(1), low, high, mean, root), 1), elements
