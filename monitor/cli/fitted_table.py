"""A table that keeps its numbers whole: a narrow terminal shows fewer columns and shorter names."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from trainsentry.exporters.short_text import plain, shorten

SHORTEST_NAME: Final = 16
"""Characters of a name at least, before a column is left out for it."""


@dataclass(frozen=True)
class FittedColumn:
    """A column and its cells. Those with a higher `rank` are left out first, and 0 stays.

    The cells of the one `flexible` column are shortened to the room that the others leave.
    """

    title: str
    cells: list[str]
    rank: int = 0
    right: bool = True
    flexible: bool = False
    styles: list[str] = field(default_factory=list)

    @property
    def width(self) -> int:
        """Characters of the widest cell."""
        return max(cell_len(text) for text in (self.title, *map(plain, self.cells)))


def fitted(columns: Sequence[FittedColumn], width: int, title: str | None = None) -> Table:
    """Return a table of at most `width` characters."""
    shown = [column for column in columns if any(column.cells)]
    while (left := _left(shown, width)) < SHORTEST_NAME and any(column.rank for column in shown):
        widest = max(shown, key=lambda column: column.rank)
        if left >= max((column.width for column in shown if column.flexible), default=0):
            break
        shown = [column for column in shown if column is not widest]
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in shown:
        least = min(left, column.width) if column.flexible else column.width
        table.add_column(
            column.title, justify="right" if column.right else "left", no_wrap=True, min_width=max(least, 1)
        )
    for i in range(max((len(column.cells) for column in shown), default=0)):
        table.add_row(*(_cell(column, i, left) for column in shown))
    return table


def _left(columns: Sequence[FittedColumn], width: int) -> int:
    """Return the characters that are left for the flexible column; each column is followed by two spaces."""
    return width - sum(2 + (0 if column.flexible else column.width) for column in columns)


def _cell(column: FittedColumn, i: int, left: int) -> Text:
    text = plain(column.cells[i])
    style = column.styles[i] if column.styles else ""
    return Text(shorten(text, max(left, 2)) if column.flexible else text, style=style)
