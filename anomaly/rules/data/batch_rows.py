"""The rows of a batch that do not belong to it: looked at once trouble is there, as it may be that of the data."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from trainsentry.anomaly.anomaly import DEAD, DUPLICATE_DATA, NONFINITE, SPIKE, Anomaly, Detector
from trainsentry.anomaly.series_arrays import rows_where
from trainsentry.collectors.shared.batch_rows import HIGH, LOW, NOT_FINITE, ROOT, InputRows

SCORE: Final = 1000.0
"""Deviations: above every other rule on the same input, which knows nothing of its rows."""

FEWEST_ROWS: Final = 4
"""Rows among which one can be told from the others."""

FEWEST_ELEMENTS: Final = 8
"""Elements of a row below which it may be constant, equal to another, or near zero, by chance."""

TIMES: Final = 8.0
"""Least factor between a row's root mean square and the median of all rows."""

DEVIATIONS: Final = 10.0
"""Least distance of a row's logarithm from that median, in robust deviations (1.4826 times the median distance)."""

FEW: Final = 0.25
"""Largest share of rows that are told from the others by their size."""

MOST_NAMED: Final = 8
"""Rows named one by one; of more, the first ones and their number."""

Rows = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class OddRows:
    """Rows that do not belong to their batch: what they are, with a number of theirs and the usual one."""

    kind: str
    words: str
    rows: Rows
    value: float = math.nan
    expected: float = math.nan


class BatchRowsRule(Detector):
    """Judges the rows of the batch in which an incident began, from the rows alone."""

    name: ClassVar[str] = "batch_rows"
    compares_ranks: ClassVar[bool] = True  # no table has the rows

    @staticmethod
    def judge(step: int, rank: int, inputs: Sequence[InputRows], others: Sequence[InputRows] = ()) -> list[Anomaly]:
        """Return an anomaly for each input with rows that do not belong there; `step` is that of the batch.

        `others` are the same inputs in other steps: what is odd in the same way there is so by design.
        """
        designs = {(other.name, odd.kind) for other in others if (odd := odd_rows(other)) is not None}
        found = ((given, odd_rows(given)) for given in inputs)
        return [
            _anomaly(step, rank, given, odd)
            for given, odd in found
            if odd is not None and (given.name, odd.kind) not in designs
        ]

    @staticmethod
    def sentence(anomaly: Anomaly, _subject: str) -> str:
        """Return which rows of which input are odd; the words are the anomaly's `statistic`."""
        return f"in the batch of step {anomaly.step}, {anomaly.statistic} (data {anomaly.name})"


def odd_rows(given: InputRows) -> OddRows | None:
    """Return the rows of an input that do not belong to it, None where there are none."""
    rows, n = given.rows, len(given.rows)
    bad = rows_where(rows[:, NOT_FINITE] > 0)
    if len(bad):
        return OddRows(NONFINITE, f"{_named(bad, n)} hold NaN or Inf", bad, float(rows[bad[0], NOT_FINITE]), 0.0)
    if n < FEWEST_ROWS:
        return None
    is_mask = bool((rows[:, LOW] >= 0).all() and (rows[:, HIGH] <= 1).all() and not given.floating)
    if given.elements >= FEWEST_ELEMENTS and not is_mask:
        constant = rows_where(rows[:, LOW] == rows[:, HIGH])
        if 0 < len(constant) <= n / 2:
            words = f"every element of {_named(constant, n)} is the same"
            return OddRows(DEAD, words, constant, float(rows[constant[0], LOW]))
        _, first, counts = np.unique(rows, axis=0, return_index=True, return_counts=True)
        if counts.max() > n / 2 and len(constant) < n:
            equal = rows_where((rows == rows[first[counts.argmax()]]).all(axis=1))
            return OddRows(DUPLICATE_DATA, f"{_named(equal, n)} are equal", equal)
    return _far_rows(given) if given.floating else None


def _far_rows(given: InputRows) -> OddRows | None:
    """Return the few rows that are far larger or smaller than the others."""
    root, n = given.rows[:, ROOT], len(given.rows)
    if not (root > 0).all():
        return None
    logs = np.log(root)
    above = logs - np.median(logs)
    distance = np.abs(above)
    spread = 1.4826 * float(np.median(distance))
    may_be = (above > 0) | (given.elements >= FEWEST_ELEMENTS)
    far = rows_where(may_be & (distance > math.log(TIMES)) & (distance > DEVIATIONS * spread))
    if not len(far) or len(far) > FEW * n:
        return None
    worst, usual = far[distance[far].argmax()], float(np.median(root))
    times = root[worst] / usual
    size = f"{times:.3g} times as large as" if times > 1 else f"{1 / times:.3g} times smaller than"
    words = f"row {worst} of {n} is {size} usual"
    if len(far) > 1:
        words = f"{_named(far, n)} differ in size from the others, row {worst} most: it is {size} usual"
    return OddRows(SPIKE, words, far, float(root[worst]), usual)


def _named(rows: Rows, of: int) -> str:
    """Return rows in words.

    >>> _named(np.array([2]), 16), _named(np.array([0, 3]), 16), _named(np.arange(16), 16)
    ('row 2 of 16', 'rows 0 and 3 of 16', 'all 16 rows')
    """
    if len(rows) == of:
        return f"all {of} rows"
    numbers = [str(row) for row in rows[:MOST_NAMED].tolist()]
    if len(rows) > MOST_NAMED:
        return f"{len(rows)} of {of} rows ({', '.join(numbers)}, …)"
    listed = f"{', '.join(numbers[:-1])} and {numbers[-1]}" if numbers[1:] else numbers[0]
    return f"row{'s' * bool(numbers[1:])} {listed} of {of}"


def _anomaly(step: int, rank: int, given: InputRows, odd: OddRows) -> Anomaly:
    words = odd.words if len(odd.rows) > 1 else odd.words.replace(" hold ", " holds ")
    return Anomaly(
        step=step,
        micro_step=given.micro_step,
        rank=rank,
        order=0,
        name=given.name,
        quantity="data",
        statistic=words,
        value=odd.value,
        expected=odd.expected,
        score=SCORE,
        detector=BatchRowsRule.name,
        kind=odd.kind,
        last_clean=step - 1,
    )
