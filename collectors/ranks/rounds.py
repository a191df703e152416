"""The rendezvous server's bounded state: open rounds, in which each rank gives one value, and the store's entries."""

import math
from typing import Any, Final

MOST_ROUNDS: Final = 64
"""Open rounds at once; ranks that train together are in one or two."""

MOST_NUMBERS: Final = 256
"""Numbers of one proposal; the monitor's have some ten."""

MOST_ENTRIES: Final = 16
"""Store entries of one rank; the watch for hangs writes one."""

LONGEST_KEY: Final = 256
"""Characters of a store entry's key."""

LONGEST_TEXT: Final = 2**16
"""Characters of a store entry's text; the report of a hang has some hundred."""


def checked_number(value: Any) -> int:
    """Return the number of a round or a request.

    Raises:
        TypeError: when it is not a whole number from 0 to 2^53 - 1.

    """
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**53:
        raise TypeError(f"a number must be a whole one from 0 to 2^53 - 1, got a {type(value).__name__}")
    return value


class Rounds:
    """The open rounds of `size` ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._given: dict[tuple[str, int], dict[int, Any]] = {}

    @property
    def open(self) -> bool:
        """Whether a round is open."""
        return bool(self._given)

    def take(self, kind: str, number: int, rank: int, given: Any) -> None:
        """Add a rank's value to a round.

        Raises:
            ValueError: when a proposal is not a list of numbers, or too many rounds are open.

        """
        if kind == "greatest" and not _are_numbers(given):
            raise ValueError("a proposal must be a list of numbers, none of them NaN")
        if (kind, number) not in self._given and len(self._given) >= MOST_ROUNDS:
            raise ValueError("too many rounds at once")
        self._given.setdefault((kind, number), {})[rank] = given

    def misfits(self, kind: str, number: int) -> set[int]:
        """Return the ranks whose proposal differs in length from rank 0's, once every rank has proposed."""
        values = self._given[kind, number]
        if kind != "greatest" or len(values) < self.size:
            return set()
        return {rank for rank, given in values.items() if len(given) != len(values[0])}

    def result(self, kind: str, number: int) -> list[Any] | None:
        """Return the round's result for all ranks and close the round; None while a rank's value is missing."""
        by_rank = self._given[kind, number]
        if len(by_rank) < self.size:
            return None
        del self._given[kind, number]
        values = [by_rank[rank] for rank in range(self.size)]
        return values if kind == "gather" else [max(column) for column in zip(*values, strict=True)]

    def forget(self) -> None:
        """Close all rounds without a result: a rank has left."""
        self._given.clear()


def _are_numbers(given: Any) -> bool:
    """Whether a proposal is a list of numbers; NaN has no place in a maximum."""
    return (
        isinstance(given, list)
        and len(given) <= MOST_NUMBERS
        and all(isinstance(x, int | float) and not isinstance(x, bool) and not math.isnan(x) for x in given)
    )


class StoreEntries:
    """The texts that ranks have stored; a key ends with the number of the rank that wrote it."""

    def __init__(self) -> None:
        self._by_rank: dict[int, dict[str, str]] = {}

    def put(self, rank: int, key: Any, text: Any) -> None:
        """Store a rank's text.

        Raises:
            ValueError: when key or text are not text or too long, the key is another rank's, or the store is full.

        """
        own = self._by_rank.setdefault(rank, {})
        fits = isinstance(key, str) and isinstance(text, str) and len(key) <= LONGEST_KEY and len(text) <= LONGEST_TEXT
        if not fits or key.rpartition("/")[2] != str(rank) or (key not in own and len(own) >= MOST_ENTRIES):
            raise ValueError("an entry that cannot be stored")
        own[key] = text

    def under(self, prefix: Any) -> dict[str, str]:
        """Return the texts whose keys begin with `prefix`, by key.

        Raises:
            TypeError: when the prefix is not text.

        """
        if not isinstance(prefix, str):
            raise TypeError(f"a prefix must be text, got a {type(prefix).__name__}")
        return {key: text for own in self._by_rank.values() for key, text in own.items() if key.startswith(prefix)}
