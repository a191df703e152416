"""Judges a record by the past of its series, at the allowed rate of false alarms, and learns from it."""

from collections import deque
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from trainsentry.anomaly.baselines.common_changes import ScoredRecord
from trainsentry.anomaly.baselines.false_alarms import Allowed, Surprises, Verdict
from trainsentry.anomaly.baselines.known_changes import KnownChanges, finite_columns
from trainsentry.anomaly.baselines.levels.input_level import InputLevel
from trainsentry.anomaly.baselines.levels.level_shifts import LevelShifts
from trainsentry.anomaly.baselines.levels.loss_level import LossLevel
from trainsentry.anomaly.baselines.outlier_findings import OutlierFindings
from trainsentry.anomaly.baselines.row_scores import OUTLIER
from trainsentry.anomaly.baselines.scoring import Scoring
from trainsentry.anomaly.baselines.seen_sizes import SeenSizes
from trainsentry.anomaly.baselines.whole_zeros import WholeZeros
from trainsentry.anomaly.features import ZEROS_FEATURE
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.data.data_dependence import DataDependence
from trainsentry.anomaly.rules.optimizer.frozen import LEAST_RATIO
from trainsentry.anomaly.rules.rule import Observed
from trainsentry.anomaly.series_arrays import Floats, Integers, Mask, SeriesArrays, rows_where
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import UPDATE
from trainsentry.collectors.statistics import INFS, NANS, VALUE, ZEROS

WARM_UP: Final = 16
"""Records before the first alarm: the detector must first see the range of healthy scores."""

AFTERMATH: Final = 20
"""Steps after an alarm in which single rows that are far out are listed too."""

MOST_CANDIDATES: Final = 64
"""Odd rows that are kept of a record, a bound on memory."""

LEARN_AFTER: Final = 12
"""Records between a record and the learning of its scores; an alarm in between discards them. The first sign of a fault
must not make the second one look normal."""

YOUNG_WEIGHT: Final = 0.1
"""Weight of the scores of the first records: a model that starts to train is wilder than it will ever be."""

AFTERMATH_P: Final = 1e-3
ALARM_P: Final = 1e-2
LEAST_SCORE: Final = 4.0
"""Largest p-value, after an alarm and in one, and least deviations of a row that is listed."""

LEAST_OF_SCALARS: Final = 2.5
LEAST_P_OF_SCALARS: Final = 0.05
"""Least deviations and largest p-value in an alarm of logged scalars."""

FLAG_P: Final = 2e-3
"""p-value at which a logged scalar is listed by itself, however many tensors there are: people look at the loss and the
gradient norm first, and these lead a divergence by steps."""


LOST_BELOW: Final = 2.0
RATE_FADES: Final = 0.9
"""Factor by which the learning rate has fallen since an update was sampled where more of it may be lost in rounding,
and what is left of the older, larger rates from one sample to the next."""

_NUMBERS: Final = frozenset({"int64", "int32", "int16"})
"""Dtypes of inputs whose elements are numbers of tokens or of classes: their mean says little. Labels that are padded
with −100 have another one where all targets of a batch are equally long by chance, so no verdict rests on them, unless
`PERSISTS` samples before were odd too, or a batch has more zeros than any: a part of it is missing."""

PERSISTS: Final = 2


@dataclass(frozen=True, slots=True)
class Outliers:
    """The outliers of one record: its scores, the verdict, and masks of shape (n,).

    `wrong` are the rows that a rule finds wrong by themselves, `listed` the outliers that are reported, `odd_scalars`
    and `abnormal` the rows far enough out to pass their fault on. `groups` are the findings of common changes, of a
    record that is suspicious, and `levels` those of series that have left their range for good.
    """

    make: OutlierFindings
    verdict: Verdict
    wrong: Mask
    listed: Mask
    odd_scalars: Mask
    abnormal: Mask
    groups: list[Finding]
    rows: list[Finding]
    levels: list[Finding]

    @property
    def findings(self) -> list[Finding]:
        """The findings that are reported."""
        return [*self.rows, *self.levels, *(self.groups if self.verdict.alarm else ())]

    @property
    def candidates(self) -> list[Finding]:
        """Findings too weak to be reported, in case an alarm follows: common changes, then the most odd rows."""
        observed, scored = self.make.observed, self.make.scored
        far = (scored.score >= OUTLIER) & (scored.p <= ALARM_P)
        odd = rows_where(observed.judged & ~self.wrong & ~self.listed & (far | self.odd_scalars))
        odd = odd[np.argsort(-scored.score[odd])[:MOST_CANDIDATES]]
        groups = [replace(finding, alarm=False) for finding in self.groups]
        return [*groups, *(self.make.of_row(row, 0, alarm=False) for row in sorted(odd.tolist()))]


@dataclass(frozen=True, slots=True)
class _Pending:
    """The scores of a record that are learned later, unless an alarm comes in between."""

    ids: Any
    scored: ScoredRecord
    rows: Mask
    surprises: Surprises
    sums: list[float]


class OutlierDetector:
    """The baselines of all series, and the calibrated probability of steps."""

    def __init__(self, arrays: SeriesArrays, allowed: Allowed | None = None) -> None:
        self.scoring = Scoring(arrays)
        self._allowed = allowed or Allowed()
        self._known = KnownChanges(arrays)
        self._zeros = WholeZeros(arrays)
        self._levels, self._data = LevelShifts(arrays), arrays.shared(DataDependence)
        self._loss_level, self._input_level = LossLevel(arrays, self.scoring.learned_loss), InputLevel(arrays)
        self._seen = arrays.shared(SeenSizes)
        self._lowest, self._highest = arrays.series.column(np.float64, np.nan), arrays.series.column(np.float64, np.nan)
        self._is_input = arrays.series.column(bool, of=lambda s: s.is_model_input)
        self._is_update = arrays.series.column(bool, of=lambda s: s.quantity == UPDATE)
        self._rate_of = arrays.series.column(np.float64, np.nan)  # of an update's samples so far, mostly of the newest
        self._ratio_of = arrays.series.column(np.float64, np.nan)  # of an update's last sample
        self._most_zeros = arrays.series.column(np.float64, np.nan)
        self._holds_numbers = arrays.layouts.column(bool, of=lambda layout: layout.dtype in _NUMBERS)
        self._surprises: dict[str, Surprises] = {}
        self._alarm_step = self._trouble_step = self._last_trouble = -AFTERMATH - 1
        self._records = 0
        self._pending: deque[_Pending] = deque()

    @property
    def last_clean(self) -> Integers:
        """The last step at which each series was healthy, -1 for never; shape (series,)."""
        return self.scoring.baseline.last_clean

    def allow(self, allowed: Allowed) -> None:
        """Allow another rate of false alarms from now on."""
        self._allowed = allowed

    def judge(self, observed: Observed, rejected: Mask) -> Outliers:
        """Return the outliers of a record; `rejected` masks the rows that a rule finds wrong by themselves."""
        record, scalar = observed.record, observed.facts.scalar[observed.record.where]
        self._zeros.take_in(observed)
        resting, woken = self._zeros.resting & ~rejected, self._zeros.woken
        if woken.any():
            self.scoring.baseline.reset(record.ids[woken])
            self._levels.reset(record.ids[woken])
        self._data.note(observed)
        judged = observed.judged & ~self._changed_sign(record, scalar) & ~resting
        judged &= ~self._follows_data(observed, resting)
        observed = replace(observed, judged=judged, excused=observed.excused | resting)
        is_declared = self._known.note(record)
        if self._known.rate_is_zero:  # then updates are
            judged = judged & ~self._is_update.values[record.where]
        if is_declared:
            self.scoring.expect_change()
        updates = self._is_update.values[record.where]
        self._expect_lost_updates(record.ids[updates], record.values[updates, VALUE])
        self._expect_levels(may_all_change=is_declared or self._known.is_resized(observed))
        divisor = self._known.divisors(record)
        in_a_row, columns = self.scoring.baseline.outliers[record.where], finite_columns(record)
        inputs = rows_where(self._is_input.values[record.where] & self._holds_numbers.values[record.layouts])
        trusted, numbers = judged & ~rejected, inputs[self._say_little(record, inputs, in_a_row)]
        trusted[numbers] = False
        scored = self.scoring.score(record.ids, columns, observed.numel, scalar, divisor, trusted)
        self._note_zeros(record, inputs[scored.score[inputs] < LEAST_SCORE])
        scored.p[numbers[scored.score[numbers] >= LEAST_SCORE]] = ALARM_P  # they take part in an alarm, and make none
        allowed = self._allowed.in_a_step(self._known.seconds)
        verdict = self._surprises_of(record).judge(scored.surprise, allowed, ready=self._is_ready)
        odd_scalars: Mask = scalar & (scored.score >= LEAST_OF_SCALARS)
        wrong = rejected & observed.facts.watched[record.where]
        listed = self._listed(scored, verdict, judged, odd_scalars, record.step) & ~wrong
        make = OutlierFindings(observed, scored, divisor)
        levels = self._levels.judge(observed, scored, divisor, rejected, self._loss_level)
        if self._levels.data_is_renewed:
            self._loss_level.reset()
            self._input_level.reset()
        for finding in levels:
            self._loss_level.note_told(finding)
        levels += self._loss_level.judge(observed)
        levels += self._input_level.judge(observed, self._loss_level.is_worse_since)
        return Outliers(
            make=make,
            verdict=verdict,
            wrong=wrong,
            listed=listed,
            odd_scalars=odd_scalars,
            abnormal=(scored.score >= LEAST_SCORE) | (scored.drift > 0) | odd_scalars,
            groups=make.of_groups(self.scoring.groups.names, self._first_rows(record)) if verdict.suspicious else [],
            rows=[make.of_row(row, int(in_a_row[row]), alarm=verdict.alarm) for row in rows_where(listed).tolist()],
            levels=[f for f in levels if not (verdict.alarm and listed[f.row])],
        )

    def _follows_data(self, observed: Observed, resting: Mask) -> Mask:
        """Return which rows tell of their batch, where batches depend on each other or lack a condition, shape (n,)."""
        record, facts = observed.record, observed.facts
        activation, backward = facts.activation[record.where], facts.backward[record.where]
        found: Mask = np.zeros(len(record), bool)
        if (resting & self._is_input.values[record.where]).any():  # what follows from a condition that is left out
            found |= activation
        if self._data.is_high:  # the loss, and the gradients at activations that follow it
            found |= facts.scalar[record.where] | (backward & activation)
        is_dependent = self._data.was_high()  # a policy meets again what it met before, and moves on for good
        self._seen.take_in(observed, dependent=is_dependent)
        found |= self._seen.familiar
        if is_dependent:
            self.scoring.reset_drift(record.ids[(self._is_input.values | facts.backward)[record.where]])
        if self._data.is_gathered:  # each rollout has levels of its own, and surprises a critic at first
            found |= activation | (backward & self._data.begins_rollout(record.step))
            self.scoring.reset_drift(record.ids)
            self._input_level.reset()
        return found

    def _expect_levels(self, *, may_all_change: bool) -> None:
        """Forget levels that may change by right: all, or those that the learning rate moves."""
        if may_all_change:
            self._input_level.reset()
        if may_all_change or self._known.rate_has_risen:
            self._loss_level.reset()
            self._levels.reset(slice(None))

    def _expect_lost_updates(self, ids: Any, values: Floats) -> None:
        """Forget the shares of zeros of updates at a far larger learning rate: rounding takes more of smaller ones.

        And where the rate rises far, as a schedule restarts: it takes fewer then. And those of updates that are a few
        units in the last place of their weights, by their ratios `values`.
        """
        if self._known.rate_has_risen:
            self.scoring.baseline.forget(ids, ZEROS_FEATURE)
        ratios = np.where(np.isnan(self._ratio_of.values[ids]), np.inf, self._ratio_of.values[ids])
        self._ratio_of.values[ids] = values
        self.scoring.baseline.forget(ids[np.fmin(ratios, values) < LEAST_RATIO], ZEROS_FEATURE)
        rate, known = self._known.rate, self._rate_of.values
        fell = rate * LOST_BELOW <= known[ids]
        self.scoring.baseline.forget(ids[fell], ZEROS_FEATURE)
        known[ids] = np.where(fell, rate, np.fmax(rate, RATE_FADES * known[ids]))

    def _changed_sign(self, record: StepRecord, scalar: Mask) -> Mask:
        """Return which rows are of scalars that have been negative and positive, shape (n,): size means nothing there.

        The losses of policy gradients, and logarithms of densities, cross zero.
        """
        ids, values = record.ids[scalar], record.values[scalar, VALUE]
        self._lowest.values[ids] = np.fmin(self._lowest.values[ids], values)
        self._highest.values[ids] = np.fmax(self._highest.values[ids], values)
        changed: Mask = np.zeros(len(record), bool)
        changed[scalar] = (self._lowest.values[ids] < 0) & (self._highest.values[ids] > 0)
        return changed

    def learn(self, outliers: Outliers, rejected: Mask) -> None:
        """Learn a record after it was judged: its healthy rows at once, its scores some records later."""
        observed, scored, verdict = outliers.make.observed, outliers.make.scored, outliers.verdict
        record, ids = observed.record, observed.record.ids
        is_number, infs = record.columns[NANS] == 0, record.columns[INFS]
        finite = (infs == 0) | ((infs > 0) & ~rejected)  # some activations hold Inf by design
        healthy = ~outliers.wrong & is_number & finite & ~observed.excused
        self.scoring.learn(ids, scored, healthy, record.step)
        self.scoring.common.learn(scored.common)
        self._learn_later(outliers, observed.judged & healthy)
        if verdict.alarm or outliers.levels:
            self._seen.reject()
        if verdict.alarm:
            self.scoring.reset_drift(ids[outliers.listed])

    def _learn_later(self, outliers: Outliers, rows: Mask) -> None:
        """Learn the scores of a record as healthy ones, `LEARN_AFTER` records later."""
        record, scored = outliers.make.observed.record, outliers.make.scored
        surprises = self._surprises_of(record)
        if outliers.verdict.alarm or outliers.wrong.any():
            surprises.forget_last()
            if record.step - self._last_trouble > AFTERMATH:  # a new trouble: its first signs are not healthy either
                self._pending.clear()
                self._trouble_step = record.step
            self._last_trouble = record.step
        if record.step - self._trouble_step <= AFTERMATH:
            return  # trouble that lasts longer is the new normal
        self._records += 1
        if not self._is_ready:
            self.scoring.learn_tails(record.ids, scored, rows, YOUNG_WEIGHT)
            return
        self._pending.append(_Pending(record.ids, scored.scores_alone(), rows, surprises, surprises.sums))
        if len(self._pending) > LEARN_AFTER:
            due = self._pending.popleft()
            due.surprises.learn(due.sums)
            self.scoring.learn_tails(due.ids, due.scored, due.rows)

    @property
    def _is_ready(self) -> bool:
        return self._records >= WARM_UP

    def _say_little(self, record: StepRecord, inputs: Integers, in_a_row: Integers) -> Mask:
        """Return which inputs of numbers say little: not for long, and with no more zeros than healthy batches had."""
        usual = self._most_zeros.values[record.ids[inputs]]
        found: Mask = (in_a_row[inputs] < PERSISTS) & ~(record.columns[ZEROS, inputs] > usual)
        return found

    def _note_zeros(self, record: StepRecord, inputs: Integers) -> None:
        """Note the largest share of zeros that inputs have had in healthy batches."""
        most, ids = self._most_zeros.values, record.ids[inputs]
        most[ids] = np.fmax(most[ids], record.columns[ZEROS, inputs])

    def _surprises_of(self, record: StepRecord) -> Surprises:
        """Return the surprises of records with the same groups of series."""
        names = self.scoring.groups.names
        key = ",".join(names[number] for number, _ in self.scoring.rows.of(record.ids).groups)
        return self._surprises.setdefault(key, Surprises())

    def _first_rows(self, record: StepRecord) -> dict[int, int]:
        """Return the first row of each group."""
        return {number: int(rows[0]) for number, rows in self.scoring.rows.of(record.ids).groups}

    def _listed(self, scored: ScoredRecord, verdict: Verdict, judged: Mask, odd_scalars: Mask, step: int) -> Mask:
        """Return the rows that are reported."""
        p = np.minimum(scored.p, scored.drift_p)
        flagged: Mask = judged & odd_scalars & (p <= FLAG_P)
        if verdict.alarm:
            self._alarm_step = step
            limit = max(ALARM_P, float(p[judged].min(initial=1.0)))
        elif step - self._alarm_step <= AFTERMATH:
            limit = AFTERMATH_P
        elif verdict.suspicious:
            limit = float(p[judged].min(initial=1.0))
        else:
            return flagged
        far = (scored.score >= LEAST_SCORE) | (scored.drift > 0)
        if verdict.alarm:
            far |= odd_scalars
            limit = max(limit, LEAST_P_OF_SCALARS)
        listed: Mask = flagged | (judged & (p <= limit) & far)
        return listed

    def saved(self, size: int) -> dict[str, Any]:
        """Return the learned state as plain data; `size` is the number of series."""
        surprises = {key: surprises.saved() for key, surprises in self._surprises.items()}
        by_series = {"levels": self._levels.saved(size), "data_dependence": self._data.saved(size)}
        by_series["seen_sizes"] = self._seen.saved(size)
        return {**self.scoring.saved(size), **by_series, "surprises": surprises}

    def load(self, state: dict[str, Any]) -> None:
        """Restore the state that is not by series."""
        self._expect_levels(may_all_change=True)
        self.scoring.load_groups(state)
        for key, saved in state["surprises"].items():
            self._surprises.setdefault(key, Surprises()).load(saved)
        self._records = WARM_UP
        if "data_dependence" in state:
            self._data.load(state["data_dependence"])

    def adopt(self, series_id: int, state: dict[str, Any], position: int) -> None:
        """Restore one series, which was at `position` of the saved series."""
        self.scoring.baseline.adopt(series_id, state, position)
        if "levels" in state:
            self._levels.adopt(series_id, state["levels"], position)
        if "data_dependence" in state:
            self._data.adopt(series_id, state["data_dependence"], position)
        self._seen.adopt(series_id, state.get("seen_sizes", {}), position)
        self.scoring.step_noise.adopt(series_id, state.get("leaps", {}), position)
        self.scoring.learned_loss.adopt(series_id, state.get("loss_starts", {}), position)
