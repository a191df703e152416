"""The shape of a rule: its name, its inputs, its judgement, its sentence and its state."""

from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

from trainsentry.anomaly.anomaly import Detector
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.series_arrays import Floats, Mask, SeriesArrays
from trainsentry.anomaly.series_facts import SeriesFacts
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import SeriesTable

EVERY_TENSOR: Final = "tensors"
OPTIMIZER_STATE: Final = "optimizer_state"
"""Stand in `Rule.quantities` for every tensor quantity, and for every tensor of the optimizer's own state."""


@dataclass(frozen=True, slots=True)
class Observed:
    """One step record of n rows, as every rule sees it.

    `numel` counts the elements of each row, shape (n,). `judged` masks the rows that may have anomalies, shape (n,):
    inputs of modules, collective buffers, unwatched scalars and `excused` rows may not. `excused` masks the backward
    pass of a step that the loss scaler skipped, its normal work.
    """

    record: StepRecord
    table: SeriesTable
    facts: SeriesFacts
    numel: Floats
    judged: Mask
    excused: Mask


class Rule(Detector, Protocol):
    """Judges the records of one rank, in the order of their steps, from the state that it keeps.

    `quantities` and `statistics` are its inputs in a record: quantities of series (or `EVERY_TENSOR`,
    `OPTIMIZER_STATE`), and names of statistics; none of either for a rule that reads no rows.

    A rule declares its arrays over series and layouts in `__init__`; they have grown when `judge` is called.

    `wrong_rows` masks the rows of the last record that no baseline may learn from, reported or not; None for a rule
    that judges no single rows. A row that several such rules report is reported by the first in the registry.
    """

    quantities: ClassVar[frozenset[str]]
    statistics: ClassVar[frozenset[str]]
    state_key: ClassVar[str | None] = None
    """The key of the rule's state in a checkpoint; None for a rule that starts afresh."""

    wrong_rows: Mask | None = None

    def __init__(self, arrays: SeriesArrays) -> None: ...

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the findings in a record; a step may come in several records."""
        ...

    def saved(self, count: int) -> Any:
        """Return the state as plain data; of state by series, that of the first `count` series."""
        return None

    def load(self, saved: Any) -> None:
        """Restore the state that is not by series."""
        return

    def adopt(self, series_id: int, saved: Any, position: int) -> None:
        """Restore the state of one series, which was at `position` of the saved series."""
        return
