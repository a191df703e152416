"""What is known of the rows of a batch: a few numbers of each."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NOT_FINITE, LOW, HIGH, MEAN, ROOT = range(5)


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
