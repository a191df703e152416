"""Parses the header of a table, ours or msprobe's."""

from dataclasses import dataclass
from typing import Final

from trainsentry.collectors.histogram import HISTOGRAM
from trainsentry.collectors.series import VALUE_NAMES
from trainsentry.collectors.statistics import STATISTICS
from trainsentry.exporters.csv.format import EXTRA_COLUMNS, FIRST_COLUMNS, LAST_COLUMNS, SCALAR_COLUMNS, SCALARS
from trainsentry.exporters.short_text import shorten

MSPROBE_NUMBERS: Final = frozenset(
    {*STATISTICS, "id", "entropy", "softmax_max", "softmax", "sr", "kernel_norm", "eig"}
    | {"router_weight_similarity", "per_token_expert_entropy"}
)
"""Numeric columns of msprobe's tables, including its interpretability features."""

MAX_COLUMNS: Final = 256
"""Columns of a table at most: ours have about twenty, msprobe's one for each enabled feature."""

RANGES: Final = {
    "vpp_stage": (-1, 1 << 15),
    "step": (0, 1 << 53),
    "micro_step": (-1, 1 << 31),
    "order": (0, 1 << 31),
}
"""Smallest and largest value of each integer column: a step that a float64 still holds exactly, and more model chunks,
micro-steps and rows of a step than occur. msprobe writes -1 for none."""

INTEGER_COLUMNS: Final = tuple(RANGES)

MAX_NAMED_COLUMNS: Final = 8
"""Unknown columns that a message names."""

_OTHER_COLUMNS: Final = frozenset(
    {*FIRST_COLUMNS, *LAST_COLUMNS, HISTOGRAM, "module_name", "scope"}
    | {c for extra in EXTRA_COLUMNS.values() for c in extra}
)


@dataclass(frozen=True)
class Header:
    """A table's columns, its numeric columns, and the column that holds the names."""

    columns: tuple[str, ...]
    numbers: tuple[str, ...]
    name: str = "name"

    @property
    def ending(self) -> str:
        """The last column; where it is empty, the line may have too few fields."""
        return self.columns[-1]

    @property
    def texts(self) -> tuple[str, ...]:
        """The text columns."""
        return tuple(column for column in self.columns if column not in self.numbers and column not in INTEGER_COLUMNS)


def parse_header(columns: list[str], table: str, *, foreign: bool) -> tuple[list[str], Header | None]:
    """Return the problems of a header, and the parsed header, or None when the file cannot be read.

    `foreign` tables are msprobe's and lack some of our columns.

    >>> parse_header(["name", "step", "micro_step", "value"], "scalars", foreign=False)[1].numbers
    ('value',)
    """
    if not columns:
        return ["the file is empty, expected a header"], None
    if len(columns) > MAX_COLUMNS:
        return [f"the header has more than {MAX_COLUMNS} columns; the file is left out"], None
    name = "module_name" if foreign and "module_name" in columns else "name"
    if foreign:
        needed: tuple[str, ...] = ("vpp_stage", name, "step")
    else:
        needed = SCALAR_COLUMNS if table == SCALARS else (*FIRST_COLUMNS, *LAST_COLUMNS)
    known = MSPROBE_NUMBERS if foreign else {"value"} if table == SCALARS else {*STATISTICS, *VALUE_NAMES.values()}
    missing = [column for column in needed if column not in columns]
    twice = sorted({column for column in columns if columns.count(column) > 1})
    numbers = tuple(column for column in columns if column in known)
    if missing or twice or not numbers:
        what = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has {', '.join(twice)} twice"] * bool(twice)
        return [f"the header {' and '.join(what) or 'has no statistics'}; the file is left out"], None
    unknown = [column for column in columns if column not in known and column not in _OTHER_COLUMNS]
    named = ", ".join(shorten(column, 60) for column in unknown[:MAX_NAMED_COLUMNS]) + " …" * (
        len(unknown) > MAX_NAMED_COLUMNS
    )
    wrong = [f"the header has unknown columns, which are left out: {named}"] * bool(unknown)
    return wrong, Header(tuple(columns), numbers, name)
