"""Arrays of lists of numbers that are usually the same at every step."""

from typing import Any

import numpy as np
import numpy.typing as npt


class RecurringArray:
    """The array of a list that usually recurs: it is made anew when the list differs, and may not be written to.

    To compare two lists of the same objects is quicker than to convert one, and touches little memory. `counts_up` says
    whether the numbers are 0, 1, 2 and so on.
    """

    counts_up = True

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype
        self._numbers: list[int] = []
        self._array = self._made([])

    def of(self, numbers: list[int]) -> npt.NDArray[Any]:
        """Return an array of a list, of shape (n,); a list that recurs has the same array object."""
        if numbers != self._numbers:
            self._array = self._made(numbers)
            self._numbers = numbers.copy()
        return self._array

    def _made(self, numbers: list[int]) -> npt.NDArray[Any]:
        self.counts_up = numbers == [*range(len(numbers))]
        made = np.asarray(numbers, self.dtype)
        made.flags.writeable = False
        return made
