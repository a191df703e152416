"""An input that the model was given in every step and is given no more: a mask that got lost on its way."""

from dataclasses import dataclass
from typing import ClassVar, Final

from trainsentry.anomaly.anomaly import OPTION_CHANGE, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.data.repeated_data import PART
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.series_arrays import SeriesArrays, rows_where
from trainsentry.collectors.series import ACTIVATION_INPUT

SCORE: Final = 60.0
"""Deviations: above every spike of healthy runs, as what a call is given is counted and is no estimate."""

GIVEN_BEFORE: Final = 20
"""Steps in a row that gave an input before its absence is a fault: some batches have images and some have none."""

MISSING: Final = 3
"""Steps in a row without the input: an exception that the loop catches may cost a pass its inputs."""

_Key = tuple[int, str]
"""A part of a pipeline, and the name of an input."""


@dataclass(slots=True)
class _Input:
    """What is known of an input: its series, the newest step that gave it, and how many in a row had given it.

    Since then it is missing in `missing` steps, from `since` on.
    """

    series_id: int
    newest: int
    given: int = 1
    missing: int = 0
    since: int = -1


class MissingInputRule(Rule):
    """Compares the names of the inputs in a step's first pass with those of the steps before.

    Nothing is said where an input of a new name comes in its place: then the call itself was written otherwise. A step
    is judged when the next one begins.
    """

    name: ClassVar[str] = "missing_input"
    quantities: ClassVar[frozenset[str]] = frozenset({ACTIVATION_INPUT})
    statistics: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, arrays: SeriesArrays) -> None:
        self._is_input = arrays.series.column(bool, of=lambda s: s.is_model_input and not s.micro_step)
        self._step = -1
        self._now: dict[_Key, int] = {}
        self._known: dict[_Key, _Input] = {}
        self._new_at: dict[int, int] = {}  # when each part of a pipeline was last given an input of a new name

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the inputs that the steps before gave no more; a step may come in several records."""
        record, found = observed.record, []
        rows = rows_where(self._is_input.values[record.where])
        if not len(rows):
            return []
        if record.step != self._step:
            found = self._end_step()
            self._step, self._now = record.step, {}
        for series_id in record.ids[rows].tolist():
            series = observed.table.series[series_id]
            self._now.setdefault((series.vpp_stage, series.name.removesuffix(PART)), series_id)
        return found

    def _end_step(self) -> list[Finding]:
        """Take in the inputs of the step that has ended."""
        for key, series_id in self._now.items():
            known = self._known.get(key)
            if known is None:
                self._known[key] = _Input(series_id, self._step)
                self._new_at[key[0]] = self._step
            else:
                known.given = known.given + 1 if not known.missing else 1
                known.newest, known.missing = self._step, 0
        called = {stage for stage, _ in self._now}
        return [
            self._finding(key, known)
            for key, known in self._known.items()
            if key[0] in called and key not in self._now and self._is_lost(key[0], known)
        ]

    def _is_lost(self, stage: int, known: _Input) -> bool:
        """Count a step without an input; return whether it was given before and has been missing for long enough."""
        known.missing += 1
        known.since = self._step if known.missing == 1 else known.since
        return known.missing == MISSING and known.given >= GIVEN_BEFORE and self._new_at[stage] <= known.newest

    def _finding(self, key: _Key, known: _Input) -> Finding:
        detail = (OPTION_CHANGE, self.name, "given", 0.0, 1.0, SCORE)
        where = {"step": known.since, "last_clean": known.newest, "passed_on": False}
        return Finding(known.series_id, -1, *detail, **where, name=key[1], quantity="data")  # type: ignore[arg-type]

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return what the model is called without."""
        return (
            f"from step {anomaly.step} on the program calls the model without {subject}, which the steps before gave it"
        )
