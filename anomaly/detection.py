"""Judges step records: which rows are abnormal, and which of those only pass on what they were given."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final

import numpy as np

from trainsentry.anomaly.anomaly import Anomaly
from trainsentry.anomaly.baselines.common_changes import ScoredRecord
from trainsentry.anomaly.baselines.false_alarms import Allowed, Surprises, Verdict
from trainsentry.anomaly.baselines.known_changes import KnownChanges
from trainsentry.anomaly.baselines.late_scalars import LateScalars
from trainsentry.anomaly.baselines.row_scores import OUTLIER
from trainsentry.anomaly.baselines.scoring import Scoring
from trainsentry.anomaly.evidence import Evidence
from trainsentry.anomaly.features import Floats
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.incidents.provenance import Provenance
from trainsentry.anomaly.learned_state import SavedSeries, described, is_current
from trainsentry.anomaly.rules.constant_data import ConstantDataRule
from trainsentry.anomaly.rules.dtype_edge import DtypeEdgeRule
from trainsentry.anomaly.rules.frozen import FrozenRule
from trainsentry.anomaly.rules.layer_outliers import LayerOutlierRule
from trainsentry.anomaly.rules.lost_state import LostStateRule
from trainsentry.anomaly.rules.nonfinite import NonfiniteRule
from trainsentry.anomaly.rules.repeated_data import RepeatedDataRule
from trainsentry.anomaly.rules.state_reset import StateResetRule
from trainsentry.anomaly.rules.switches import SwitchRule
from trainsentry.anomaly.rules.user_detectors import load_detectors
from trainsentry.anomaly.rules.weight_continuity import WeightContinuityRule
from trainsentry.anomaly.series_facts import Mask, SeriesFacts
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import Series, SeriesTable
from trainsentry.collectors.statistics import INFS, NANS

Detector = Callable[[StepRecord, SeriesTable], Iterable[Finding]]
"""A user's own detector."""

WARM_UP: Final = 16
"""Records before the first soft alarm: how far out healthy scores go must be seen before it is known."""

AFTERMATH: Final = 20
"""Steps after an alarm in which single rows that are far out are listed too."""

LOOK_BACK: Final = 8
"""Records before an alarm of which what was odd is listed with it: as many as the longest sum of surprises takes."""

MOST_CANDIDATES: Final = 64
"""Rows kept of each of them."""

LEARN_AFTER: Final = 12
"""Records after which a record's scores count as usual, unless an alarm came in between: the first sign of a fault must
not make its second one look normal."""

YOUNG_WEIGHT: Final = 0.1
"""Weight of the scores of the first records: a model that begins to train is wilder than it will ever be."""

AFTERMATH_P: Final = 1e-3
ALARM_P: Final = 1e-2
LEAST_SCORE: Final = 4.0
"""p-value and deviations of a row from which on it is listed in an alarm, or after one."""

LEAST_OF_SCALARS: Final = 2.5
LEAST_P_OF_SCALARS: Final = 0.05
"""The same for logged scalars."""

FLAG_P: Final = 2e-3
"""p-value from which on a logged scalar is suspicious by itself, however many tensors there are: the loss and the
gradient norm are looked at first, and lead a divergence by steps."""


class Detection:
    """The detectors of one rank and their state. Records come in the order of their steps."""

    def __init__(self, table: SeriesTable, allowed: Allowed | None = None, own: Iterable[Detector] = ()) -> None:
        self.table = table
        self.allowed = allowed or Allowed()
        self.facts = SeriesFacts(table)
        self.scoring = Scoring(table)
        self._nonfinite = NonfiniteRule(self.facts)
        self._edge = DtypeEdgeRule(self.facts)
        self._rules: list[Detector] = [
            lambda r, _: self._frozen.judge(r),
            lambda r, _: self._continuity.judge(r, self._numel),
            lambda r, _: self._reset.judge(r),
            lambda r, _: self._missing.judge(r),
            lambda r, _: self._switches.judge(r),
            lambda r, _: self._outliers.judge(r, self._numel),
            lambda r, _: self._batches.judge(r),
            lambda r, _: self._constant.judge(r, self._numel),
            *own,
        ]
        self._frozen, self._reset, self._switches = FrozenRule(table), StateResetRule(table), SwitchRule(table)
        self._outliers, self._batches = LayerOutlierRule(table), RepeatedDataRule(table)
        self._continuity, self._constant = WeightContinuityRule(table), ConstantDataRule(table)
        self._missing = LostStateRule(table)
        self._known = KnownChanges(table)
        self._late = LateScalars(self.facts)
        self._provenance = Provenance(table, self._late)
        self._surprises: dict[str, Surprises] = {}
        self._saved: SavedSeries | None = None
        self._alarm_step = self._trouble_step = self._last_trouble = -AFTERMATH - 1
        self._numel: Floats = np.zeros(0)
        self._records = 0
        self._candidates: deque[list[Anomaly]] = deque(maxlen=LOOK_BACK)
        self._pending: deque[tuple[Any, ScoredRecord, Mask, Surprises, list[float]]] = deque()

    def judge(self, record: StepRecord) -> list[Anomaly]:
        """Return the anomalies of a record and learn from the rows that have none.

        What the backward pass made in a step that the loss scaler skipped is the scaler's normal work: it is
        neither reported nor learned. A weight, an activation or the loss is none of its doing.
        """
        self._adopt_saved()
        bad = self._nonfinite.rows(record)
        at_edge, largest, edges = self._edge.rows(record)
        where = record.where
        judged: Mask = self.facts.judged[where] & self.facts.watched[where]
        self._late.note(record)
        judged &= ~self._late.excused(record)
        if self._known.judge(record):
            self.scoring.expect_change()
        scoring, verdict, self._numel = self._judge_softly(record, judged & ~bad & ~at_edge)
        wrong = (bad | at_edge) & self.facts.watched[where]
        listed = self._listed(scoring, verdict, judged, record) & ~wrong
        findings = [f for rule in self._rules for f in rule(record, self.table)]
        evidence = Evidence(
            record, self.table.series, scoring, self._numel, self._known.divisor, self.facts.scalar[where]
        )
        findings += [evidence.of_hard(row, bad, largest, edges) for row in np.flatnonzero(wrong & judged).tolist()]
        rows = np.flatnonzero(listed).tolist()
        in_a_row = self.scoring.baseline.outliers[where]
        findings += [evidence.of_soft(row, int(in_a_row[row]), alarm=verdict.alarm) for row in rows]
        common = evidence.of_common(self.scoring.kinds, self._first_rows(record)) if verdict.suspicious else []
        findings += common if verdict.alarm else []
        found = self._place(record, findings, scoring, wrong)
        if verdict.alarm or any(a.alarm for a in found):
            found = [*self._before(verdict.span - 1 if verdict.alarm else 0), *found]
        else:
            self._note_candidates(record, evidence, common, scoring, judged & ~wrong & ~listed)
        self._learn(record, scoring, verdict, wrong, judged)
        if verdict.alarm:
            self.scoring.begin_drift_anew(record.ids[listed])
        record.forget_columns()
        return found

    def _before(self, records: int) -> list[Anomaly]:
        """Return what was odd in the last records before an alarm that they are part of, and too weak by itself."""
        recent = list(self._candidates)[len(self._candidates) - records :] if records else []
        found = [anomaly for anomalies in recent for anomaly in anomalies]
        self._candidates.clear()
        return found

    def _note_candidates(
        self, record: StepRecord, evidence: Evidence, common: list[Finding], scoring: ScoredRecord, rows: Mask
    ) -> None:
        """Keep what is odd, in case that an alarm follows."""
        far = (scoring.score >= OUTLIER) & (scoring.p <= ALARM_P)
        odd = np.flatnonzero(rows & (far | self._scalars(scoring, record)))
        odd = odd[np.argsort(-scoring.score[odd])[:MOST_CANDIDATES]]
        weak = [replace(f, alarm=False) for f in common]
        weak += [evidence.of_soft(row, 0, alarm=False) for row in sorted(odd.tolist())]
        self._candidates.append(self._place(record, weak, scoring, np.zeros(len(record), bool)))

    # ------------------------------------------------------------------ soft evidence

    def _judge_softly(self, record: StepRecord, judged: Mask) -> tuple[ScoredRecord, Verdict, Floats]:
        numel = self._known.numel(record)
        finite = self._known.finite_columns(record)
        divisor = self._known.divisors(record)
        scoring = self.scoring.judge(record.ids, finite, numel, self.facts.scalar[record.where], divisor, judged)
        allowed = self.allowed.in_a_step(self._known.seconds)
        verdict = self._surprises_of(record).judge(scoring.surprise, allowed, ready=self._is_ready)
        return scoring, verdict, numel

    @property
    def _is_ready(self) -> bool:
        return self._records >= WARM_UP

    def _surprises_of(self, record: StepRecord) -> Surprises:
        key = ",".join(self.scoring.kinds.names[number] for number, _ in self.scoring.rows.of(record.ids).groups)
        return self._surprises.setdefault(key, Surprises())

    def _scalars(self, scoring: ScoredRecord, record: StepRecord) -> Mask:
        """Return the scalars that are odd: one number a step tells less than a tensor's, and explains more."""
        odd: Mask = self.facts.scalar[record.where] & (scoring.score >= LEAST_OF_SCALARS)
        return odd

    def _listed(self, scoring: ScoredRecord, verdict: Verdict, judged: Mask, record: StepRecord) -> Mask:
        step = record.step
        p = np.minimum(scoring.p, scoring.drift_p)
        flagged: Mask = judged & self._scalars(scoring, record) & (p <= FLAG_P)
        if verdict.alarm:
            self._alarm_step = step
            limit = max(ALARM_P, float(p[judged].min(initial=1.0)))
        elif step - self._alarm_step <= AFTERMATH:
            limit = AFTERMATH_P
        elif verdict.suspicious:
            limit = float(p[judged].min(initial=1.0))
        else:
            return flagged
        far = (scoring.score >= LEAST_SCORE) | (scoring.drift > 0)
        if verdict.alarm:
            far |= self._scalars(scoring, record)
            limit = max(limit, LEAST_P_OF_SCALARS)
        listed: Mask = flagged | (judged & (p <= limit) & far)
        return listed

    def _learn(self, record: StepRecord, scoring: ScoredRecord, verdict: Verdict, wrong: Mask, judged: Mask) -> None:
        ids = record.ids
        is_number, finite = record.columns[NANS] == 0, record.columns[INFS] == 0
        healthy = ~wrong & is_number & (finite | self._nonfinite.is_usual(record)) & ~self._late.excused(record)
        self.scoring.learn(ids, scoring, healthy, record.step)
        self.scoring.common.learn(scoring.common)
        surprises = self._surprises_of(record)
        if verdict.alarm or wrong.any():
            surprises.forget_last()
            if record.step - self._last_trouble > AFTERMATH:  # a new trouble: its first signs are not usual either
                self._pending.clear()
                self._trouble_step = record.step
            self._last_trouble = record.step
        if record.step - self._trouble_step <= AFTERMATH:
            return  # what lasts longer is how this run is
        self._records += 1
        if not self._is_ready:
            self.scoring.learn_tails(ids, scoring, judged & healthy, YOUNG_WEIGHT)
            return
        self._pending.append((ids, scoring.scores_alone(), judged & healthy, surprises, surprises.sums))
        if len(self._pending) > LEARN_AFTER:
            ids, scoring, rows, surprises, sums = self._pending.popleft()
            surprises.learn(sums)
            self.scoring.learn_tails(ids, scoring, rows)

    # ------------------------------------------------------------------ from findings to anomalies

    def _place(self, record: StepRecord, findings: list[Finding], scoring: ScoredRecord, wrong: Mask) -> list[Anomaly]:
        if not findings:
            return []
        abnormal = wrong | (scoring.score >= LEAST_SCORE) | (scoring.drift > 0) | self._scalars(scoring, record)
        self._provenance.note(record, abnormal)
        return [self._anomaly(record, f) for f in findings if f.series_id < len(self.table.series)]

    def _anomaly(self, record: StepRecord, f: Finding) -> Anomaly:
        series = self.table.series[f.series_id] if f.series_id >= 0 else _WHOLE_RUN
        known = self.scoring.baseline.last_clean
        clean = int(known[f.series_id]) if 0 <= f.series_id < len(known) else record.step - 1
        passed_on = f.passed_on if f.passed_on is not None else self._provenance.is_passed_on(series, f.series_id)
        late = self._late.is_late(f.series_id)
        return Anomaly(
            step=(record.step if f.step is None else f.step) - late,
            micro_step=series.micro_step,
            rank=record.rank,
            order=self._late.order if late else record.first_order + max(f.row, 0),
            name=self._provenance.name_of(series, f),
            quantity=self._provenance.quantity_of(series, f),
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

    def _first_rows(self, record: StepRecord) -> dict[int, int]:
        """Return the first row of each kind."""
        return {number: int(rows[0]) for number, rows in self.scoring.rows.of(record.ids).groups}

    # ------------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """Return what was learned, by series, as plain data."""
        n = min(len(self.table.series), len(self.scoring.baseline.count))
        return {
            **described(self.table, n),
            **self.scoring.saved(n),
            "surprises": {key: s.saved() for key, s in self._surprises.items()},
            "learning_rate": self._switches.saved(),
            "squares": self._reset.saved(n),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state of an earlier run; each series takes its part when it is next seen.

        A state of an earlier version is left aside: the detectors learn anew.
        """
        if not is_current(state):
            return
        self._saved = SavedSeries(state)
        self.scoring.load_kinds(state)
        for key, saved in state["surprises"].items():
            self._surprises.setdefault(key, Surprises()).load(saved)
        self._switches.load(state["learning_rate"])
        self._provenance.go_back()
        self._records = WARM_UP

    def _adopt_saved(self) -> None:
        """Give series that are new since the last record what an earlier run learned of them."""
        if self._saved is not None:
            for series_id, position in self._saved.news(self.table):
                self.scoring.baseline.adopt(series_id, self._saved.state, position)
                self.scoring.step_noise.adopt(series_id, self._saved.state.get("leaps", {}), position)
                self._reset.adopt(series_id, self._saved.state["squares"][position])


def detection_for(table: SeriesTable, settings: dict[str, Any] | None) -> Detection | None:
    """Return the detectors for settings as a recorder is told them; None without.

    Raises:
        ValueError: when a user's own detector cannot be loaded.

    """
    if settings is None:
        return None
    own = load_detectors(settings.get("detectors", []), settings.get("folders", []))
    return Detection(table, Allowed(settings["per_step"], settings["per_day"]), own)


_WHOLE_RUN: Final = Series("training", "training", scalar=True)
