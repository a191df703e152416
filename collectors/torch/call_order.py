"""What a rank calls in a step, and in which order, as one number: ranks that do the same have the same."""

import zlib
from typing import Final

SIZED: Final = frozenset({"all_reduce", "broadcast"})
"""Operations whose buffers are of one size on every rank; others may well differ."""


class CallOrder:
    """Folds the collectives of a step into a number below 2^32; 0 for none."""

    def __init__(self) -> None:
        self._number = 0

    def add(self, op: str, group: str, reduction: int, nbytes: int) -> None:
        """Take the next call: of a group in which all ranks are."""
        said = f"{op} {group} {reduction} {nbytes if op in SIZED else ''};"
        self._number = zlib.crc32(said.encode(), self._number)

    def take(self) -> int:
        """Return the number and begin anew."""
        number, self._number = self._number, 0
        return number
