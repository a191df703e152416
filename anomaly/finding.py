"""What a rule says of one series at one step."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding before it is placed: `row` is that of the record, or -1 where the series has none in it.

    `step` is the step at which it holds, if that is not the record's; `last_clean` the last one known to be healthy.
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
