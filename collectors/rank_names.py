"""Ranks as a message names them."""

from collections.abc import Sequence
from typing import Final

MOST_SHOWN: Final = 8
"""Ranks that are named; of more their number is told, so that a message about thousands stays one line."""


def ranks_named(ranks: Sequence[int]) -> str:
    """Return ranks in words.

    >>> ranks_named([3]), ranks_named([0, 2])
    ('rank 3', 'ranks 0, 2')
    >>> ranks_named(range(10))
    'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more'
    """
    more = len(ranks) - MOST_SHOWN
    shown = ", ".join(map(str, ranks[:MOST_SHOWN])) + (f" and {more} more" if more > 0 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
