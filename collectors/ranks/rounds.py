"""What ranks have said in a meeting, within bounds: rounds in which each says one thing, and words that are kept."""

import math
from typing import Any, Final

MOST_ROUNDS: Final = 64
"""Rounds that are open at once; ranks that train together are in one or two."""

MOST_NUMBERS: Final = 256
"""Numbers that a rank proposes in a round; the monitor's wishes are some ten."""

MOST_WORDS: Final = 16
"""Words that are kept of one rank; the watch for hangs leaves one."""

LONGEST_KEY: Final = 256
LONGEST_WORD: Final = 2**16
"""Characters of a word and of the name under which it is kept; a report of a hang has some hundred."""


def is_number(value: Any) -> int:
    """Return what is a number of a round or of a question.

    Raises:
        TypeError: when it is none.

    """
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**53:
        raise TypeError("a number that is none")
    return value


class Rounds:
    """The rounds of `size` ranks that have not ended."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._told: dict[tuple[str, int], dict[int, Any]] = {}

    @property
    def open(self) -> bool:
        """Whether somebody waits."""
        return bool(self._told)

    def take(self, kind: str, number: int, rank: int, given: Any) -> None:
        """Take what a rank gives.

        Raises:
            ValueError: when it cannot be given, or in too many rounds at once.

        """
        if kind == "greatest" and not _are_numbers(given):
            raise ValueError("a proposal that holds no numbers")
        if (kind, number) not in self._told and len(self._told) >= MOST_ROUNDS:
            raise ValueError("too many rounds at once")
        self._told.setdefault((kind, number), {})[rank] = given

    def odd(self, kind: str, number: int) -> set[int]:
        """Return which ranks propose more or fewer numbers than rank 0, once all have."""
        told = self._told[kind, number]
        if kind != "greatest" or len(told) < self.size:
            return set()
        return {rank for rank, given in told.items() if len(given) != len(told[0])}

    def ended(self, kind: str, number: int) -> list[Any] | None:
        """Return what goes to all, and forget the round; None while it goes on."""
        told = self._told[kind, number]
        if len(told) < self.size:
            return None
        del self._told[kind, number]
        values = [told[rank] for rank in range(self.size)]
        return values if kind == "gather" else [max(column) for column in zip(*values, strict=True)]

    def forget(self) -> None:
        """End all rounds: somebody is gone."""
        self._told.clear()


def _are_numbers(given: Any) -> bool:
    """Whether numbers can be compared: of what is no number, no greatest is known."""
    return (
        isinstance(given, list)
        and len(given) <= MOST_NUMBERS
        and all(isinstance(x, int | float) and not isinstance(x, bool) and not math.isnan(x) for x in given)
    )


class StoredWords:
    """The words that ranks have left; each rank's names end with its own number."""

    def __init__(self) -> None:
        self._words: dict[int, dict[str, str]] = {}

    def put(self, rank: int, key: Any, text: Any) -> None:
        """Keep a rank's word.

        Raises:
            ValueError: when it is none, or another rank's, or too long, or one too many.

        """
        words = self._words.setdefault(rank, {})
        fits = isinstance(key, str) and isinstance(text, str) and len(key) <= LONGEST_KEY and len(text) <= LONGEST_WORD
        if not fits or key.rpartition("/")[2] != str(rank) or (key not in words and len(words) >= MOST_WORDS):
            raise ValueError("a word that cannot be kept")
        words[key] = text

    def under(self, prefix: Any) -> dict[str, str]:
        """Return the words whose names begin with `prefix`.

        Raises:
            TypeError: when it is no text.

        """
        if not isinstance(prefix, str):
            raise TypeError("no text that names begin with")
        return {key: text for words in self._words.values() for key, text in words.items() if key.startswith(prefix)}
