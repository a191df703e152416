"""Judges step records: runs the rules and the baselines over each, and makes anomalies of their findings."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final

import numpy as np

from trainsentry.anomaly.anomaly import Anomaly
from trainsentry.anomaly.baselines.false_alarms import Allowed
from trainsentry.anomaly.baselines.late_scalars import LateScalars
from trainsentry.anomaly.baselines.outlier_detector import OutlierDetector
from trainsentry.anomaly.finding import Finding, checked
from trainsentry.anomaly.incidents.provenance import Provenance, name_of, quantity_of
from trainsentry.anomaly.learned_state import LEARNED_STATE, VERSION, SavedSeries, described, is_current
from trainsentry.anomaly.rules.nonfinite import NonfiniteRule
from trainsentry.anomaly.rules.registry import rules
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.rules.user_detectors import DetectorFunction, UserDetector, load_detectors
from trainsentry.anomaly.series_arrays import Integers, Mask, SeriesArrays, rows_where
from trainsentry.anomaly.series_facts import SeriesFacts
from trainsentry.anomaly.summed_gradients import SummedGradients
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import Series, SeriesTable

LOOK_BACK: Final = 8
"""Records before an alarm whose odd rows are listed with it: as many as the longest sum of surprises takes."""

Failed = Callable[[str, Exception], None]
"""Takes the name of a rule that has failed, and the exception."""

Unfit = list[tuple[str, Exception]]
"""Parts of a learned state that could not be taken over, each with why not."""

_WHOLE_RUN: Final = Series("training", "training", scalar=True)
"""The series of a finding that concerns the training as a whole."""


class Detection:
    """The rules and baselines of one rank, with their state. Records come in the order of their steps.

    It runs the rules of the registry, then `own`, a user's detectors. `allowed` is the rate of false alarms.
    `per_micro_step`: gradients were read after each micro-step, where else they are read before each update. With
    `failed`, a rule that raises is reported there by its name, and judges no more; without it the exception is raised.
    """

    def __init__(
        self,
        table: SeriesTable,
        allowed: Allowed | None = None,
        own: Iterable[DetectorFunction] = (),
        *,
        per_micro_step: bool = False,
        failed: Failed | None = None,
    ) -> None:
        self.table = table
        self._failed = failed
        self.per_micro_step = per_micro_step
        self._arrays = SeriesArrays(table)
        self.facts = SeriesFacts(self._arrays)
        self._rules: list[Rule] = [make(self._arrays) for make in rules()]
        self._nonfinite = next(rule for rule in self._rules if isinstance(rule, NonfiniteRule))
        self._finite = self._arrays.series.column(np.int64, -1)  # the last step of a record that waited
        self._layout = self._arrays.series.column(np.int64, -1)  # each one's newest
        self._judges: list[Rule | UserDetector] = [*self._rules, *map(UserDetector, own)]
        self._late = LateScalars(self.facts, self._arrays)
        self._outliers = OutlierDetector(self._arrays, allowed)
        self._sums = SummedGradients(self._arrays)
        self._provenance = Provenance(table, self._late)
        self._rows: Integers | None = None  # of the record being judged: their places in the recorded one
        self._saved: SavedSeries | None = None
        self._candidates: deque[list[Anomaly]] = deque(maxlen=LOOK_BACK)

    def judge(self, record: StepRecord) -> list[Anomaly]:
        """Return the anomalies of a record, and learn from its healthy rows.

        Gradients of a step that the loss scaler skipped are the scaler's normal work: they are neither reported nor
        learned. Weights, activations and the loss of such a step are judged.
        """
        self._grow(record)
        with np.errstate(all="ignore"):  # the largest and the least of numbers are usual where a training breaks
            return self._judge(record)

    def _judge(self, recorded: StepRecord) -> list[Anomaly]:
        record, self._rows = recorded, None
        if self.per_micro_step:
            record, self._rows = self._sums.last_of(recorded)
        observed = self._observe(record)
        findings, rejected = self._apply_rules(observed)
        outliers = self._outliers.judge(observed, rejected)
        findings += outliers.findings
        found = self._place(record, findings, outliers.wrong | outliers.abnormal)
        verdict = outliers.verdict
        if verdict.alarm or any(a.alarm for a in found):
            found = [*self._take_candidates(verdict.span - 1 if verdict.alarm else 0), *found]
        else:
            self._candidates.append(self._place(record, outliers.candidates, outliers.abnormal))
        self._outliers.learn(outliers, rejected)
        record.forget_columns()
        recorded.forget_columns()
        return found

    def certain(self, record: StepRecord) -> list[Anomaly]:
        """Return the NaN and Inf of a record that waits for its turn; learn nothing of it.

        Records must come in the order of their steps: each tells the later ones which series were finite.
        """
        self._grow(record)
        self._rows = None
        where, facts = record.where, self.facts
        excused = facts.backward[where] if record.skipped else np.zeros(len(record), bool)
        nonfinite = self._nonfinite.known_rows(record)
        wrong = nonfinite & facts.judged[where] & facts.watched[where] & ~excused
        findings = [self._nonfinite.finding(record, row) for row in rows_where(wrong).tolist()]
        clean = {f.series_id: self._last_finite(f.series_id, record.step) for f in findings}
        self._finite.values[record.ids[~nonfinite]] = record.step
        whole = [replace(f, passed_on=False, step=record.step, last_clean=clean[f.series_id]) for f in findings]
        return [self._anomaly(record, f) for f in whole]

    def _last_finite(self, series_id: int, step: int) -> int:
        """Return the last step before one at which a series was healthy, or finite in a record that waits."""
        known, finite = self._outliers.last_clean, int(self._finite.values[series_id])
        clean = int(known[series_id]) if series_id < len(known) else -1
        return max(clean, finite) if finite < step else clean

    def _observe(self, record: StepRecord) -> Observed:
        where, facts = record.where, self.facts
        self._late.note(record)
        excused = self._late.excused(record)
        judged: Mask = facts.judged[where] & facts.watched[where] & ~excused
        return Observed(record, self.table, facts, self._arrays.numel.values[record.layouts], judged, excused)

    def _apply_rules(self, observed: Observed) -> tuple[list[Finding], Mask]:
        """Return the findings of all rules, and the mask of the rows that are wrong by themselves, shape (n,).

        Of the rules that judge single rows, the first one reports a row; their findings come last, by row.
        """
        findings: list[Finding] = []
        rejected: Mask = np.zeros(len(observed.record), bool)
        by_row: dict[int, Finding] = {}
        for rule in list(self._judges):
            found, wrong_rows = self._judged_by(rule, observed)
            if wrong_rows is None:
                findings += found
            else:
                rejected |= wrong_rows
                for finding in found:
                    by_row.setdefault(finding.row, finding)
        return findings + [by_row[row] for row in sorted(by_row)], rejected

    def _judged_by(self, rule: Rule | UserDetector, observed: Observed) -> tuple[list[Finding], Mask | None]:
        """Return the findings of a rule and its wrong rows; nothing of one that fails, which ends no other."""
        try:
            found = [checked(finding) for finding in rule.judge(observed)]
            wrong_rows = _of_rows(rule.wrong_rows, len(observed.record))
        except Exception as error:  # noqa: BLE001 - a rule may raise anything
            self._turn_off(rule, error)
            return [], None
        return found, wrong_rows

    def _turn_off(self, rule: Rule | UserDetector, error: Exception) -> None:
        """Report a rule that fails, and leave it out from now on; without `failed`, raise."""
        if self._failed is None:
            raise error
        self._judges.remove(rule)
        self._rules = [other for other in self._rules if other is not rule]
        self._failed(rule.name, error)

    def _take_candidates(self, records: int) -> list[Anomaly]:
        """Return the odd rows of the last records, which an alarm over several records includes; forget the others."""
        recent = list(self._candidates)[len(self._candidates) - records :] if records else []
        self._candidates.clear()
        return [anomaly for anomalies in recent for anomaly in anomalies]

    def _place(self, record: StepRecord, findings: list[Finding], abnormal: Mask) -> list[Anomaly]:
        """Make anomalies of findings: with names, steps and orders, and whether they only pass a fault on."""
        if not findings:
            return []
        self._provenance.note(record, abnormal)
        return [self._anomaly(record, f) for f in findings if f.series_id < len(self.table.series)]

    def _anomaly(self, record: StepRecord, f: Finding) -> Anomaly:
        series = self.table.series[f.series_id] if f.series_id >= 0 else _WHOLE_RUN
        known = self._outliers.last_clean
        clean = int(known[f.series_id]) if 0 <= f.series_id < len(known) else record.step - 1
        late, passed_on = self._late.is_late(f.series_id), f.passed_on
        if passed_on is None:
            passed_on = self._provenance.is_passed_on(series, f.series_id, f.kind)
        return Anomaly(
            step=(record.step if f.step is None else f.step) - late,
            micro_step=series.micro_step,
            rank=record.rank,
            order=self._late.order if late else record.first_order + self._place_of(f.row),
            name=name_of(series, f),
            quantity=quantity_of(series, f),
            statistic=f.statistic,
            value=float(f.value),
            expected=float(f.expected),
            score=float(f.score),
            detector=f.detector,
            kind=f.kind,
            module=series.module,
            last_clean=(clean if f.last_clean is None else f.last_clean) - (late and clean >= 0),
            passed_on=passed_on,
            alarm=f.alarm,
        )

    def _place_of(self, row: int) -> int:
        """Return the place in the recorded step of a row of the judged one, 0 for a finding without a row."""
        return max(row, 0) if self._rows is None or row < 0 else int(self._rows[row])

    def adopt(self, settings: dict[str, Any]) -> None:
        """Follow other settings from now on: the allowed rate of false alarms, and how gradients are read."""
        self._outliers.allow(Allowed(settings["per_step"], settings["per_day"]))
        self.per_micro_step = settings.get("per_micro_step", False)

    def state(self) -> dict[str, Any]:
        """Return the learned state, by series, as plain data."""
        self._arrays.grow()
        if self._saved is not None:
            self._adopt_saved(self._saved, self._saved.unseen(self.table))
        count = len(self.table.series)
        state = {**described(self.table, self._layout.values.tolist(), self._saved), **self._outliers.saved(count)}
        for rule in self._rules:
            if rule.state_key is not None:
                try:
                    state[rule.state_key] = rule.saved(count)
                except Exception as error:  # noqa: BLE001 - a rule may raise anything
                    self._turn_off(rule, error)
        return state

    def load(self, state: dict[str, Any]) -> Unfit:
        """Go on from the state of an earlier run; each series takes its part when it is next seen.

        A state of another version is left out as a whole, and so is one that is unfit, but for a rule's part, which is
        left out alone. Return what was left out; the detectors are then as they were.
        """
        self._provenance.go_back()
        self._finite.values[:] = -1
        if not is_current(state):
            return [(LEARNED_STATE, ValueError(f"version {state.get('version')}; allowed: {VERSION}"))]
        try:
            unfit = self._unfit_rules(state)
            names = {rule.state_key for rule, _ in unfit}
            self._take_over({key: part for key, part in state.items() if key not in names})
        except Exception as error:  # noqa: BLE001 - what a file holds may raise anything
            return [(LEARNED_STATE, error)]
        return [(f"{LEARNED_STATE} of rule {rule.name}", error) for rule, error in unfit]

    def _unfit_rules(self, state: dict[str, Any]) -> list[tuple[Rule, Exception]]:
        """Return the rules that cannot take their part of a state over; raise where the baselines cannot.

        A detection made for it takes over every series at once, so that this one never gets half of a part.
        """
        saved, unfit = SavedSeries(state), []
        trial = Detection(saved.table())
        trial._arrays.grow()
        series = list(saved.all_in(trial.table))
        trial._outliers.load(state)
        for series_id, position in series:
            trial._outliers.adopt(series_id, state, position)
        for rule in trial._rules:
            try:
                _restore(rule, state, series)
            except Exception as error:  # noqa: BLE001 - what a file holds may raise anything
                unfit.append((rule, error))
        return unfit

    def _take_over(self, state: dict[str, Any]) -> None:
        self._saved = SavedSeries(state)
        self._outliers.load(state)
        for rule in self._rules:
            if rule.state_key in state:
                rule.load(state[rule.state_key])

    def _grow(self, record: StepRecord) -> None:
        """Take in new series and layouts; give series that a record is the first to have their saved state."""
        self._arrays.grow()
        self._layout.values[record.ids] = record.layouts
        if self._saved is not None:
            self._adopt_saved(self._saved, self._saved.new(self.table, record))

    def _adopt_saved(self, saved: SavedSeries, found: Iterable[tuple[int, int]]) -> None:
        for series_id, position in found:
            self._outliers.adopt(series_id, saved.state, position)
            for rule in self._rules:
                if rule.state_key in saved.state:
                    rule.adopt(series_id, saved.state[rule.state_key], position)


def _restore(rule: Rule, state: dict[str, Any], series: list[tuple[int, int]]) -> None:
    """Give a rule its part of a state, with all series, by id and saved position."""
    if rule.state_key in state:
        rule.load(state[rule.state_key])
        for series_id, position in series:
            rule.adopt(series_id, state[rule.state_key], position)


def _of_rows(mask: Mask | None, count: int) -> Mask | None:
    """Return a rule's mask of a record's rows.

    Raises:
        ValueError: for one of another length.

    """
    if mask is not None and mask.shape != (count,):
        raise ValueError(f"wrong_rows has the shape {mask.shape}; allowed: ({count},)")
    return mask


def detection_for(
    table: SeriesTable, settings: dict[str, Any] | None, failed: Failed | None = None
) -> Detection | None:
    """Return the detection for the settings that a recorder receives; None without settings.

    Raises:
        ValueError: when a user's own detector cannot be loaded.

    """
    if settings is None:
        return None
    own = load_detectors(settings.get("detectors", []), settings.get("folders", []))
    allowed = Allowed(settings["per_step"], settings["per_day"])
    return Detection(table, allowed, own, per_micro_step=settings.get("per_micro_step", False), failed=failed)
