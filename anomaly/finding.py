"""The finding of a rule on one series at one step."""

from dataclasses import dataclass
from typing import Final

DATA: Final = "data"
"""The quantity of a fault in the model's inputs."""

ALL: Final = "all"
"""The name of a fault that concerns all series of a quantity at once."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding, before `Detection` makes an anomaly of it.

    `row` is the series' row in the record, or -1 where it has none; `series_id` is -1 for the training as a whole.
    `step` and `last_clean` are the step at which the fault holds and the last healthy step, where they are not the
    record's own. `passed_on` says whether the series got its fault from its inputs, where the rule knows that better
    than `Provenance`. `name` and `quantity` name the fault where it is not the series itself that is at fault.
    """

    series_id: int
    row: int
    kind: str
    detector: str
    statistic: str
    value: float
    expected: float
    score: float
    alarm: bool = True
    step: int | None = None
    last_clean: int | None = None
    passed_on: bool | None = None
    name: str | None = None
    quantity: str | None = None


def checked(found: object) -> Finding:
    """Return what a rule has found.

    Raises:
        TypeError: for what is no finding, or has something else in the place of a number.

    """
    if not isinstance(found, Finding):
        raise TypeError(f"a rule returned {found!r}; allowed: findings")
    for number in (found.series_id, found.row, found.value, found.expected, found.score):
        float(number)
    return found
