"""All gradients that change by one factor from one step to the next, while the loss stays, or falls by that factor."""

import math
import statistics
from collections import deque
from typing import ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import SHIFT, Anomaly
from trainsentry.anomaly.finding import ALL, Finding
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.rules.scalars.declared_changes import DECLARED, DeclaredChanges
from trainsentry.anomaly.rules.scalars.loss_above_start import is_loss
from trainsentry.anomaly.rules.scalars.rate_changes import RATES, RateChanges
from trainsentry.anomaly.series_arrays import Floats, Integers, SeriesArrays, medians, rows_where
from trainsentry.collectors.series import ACTIVATION_INPUT, GRADIENT
from trainsentry.collectors.statistics import NORM, VALUE

SCORE: Final = 50.0
"""Deviations: above every spike of healthy runs, below the rules that compare ranks or sums exactly."""

LEAST_FACTOR: Final = math.log(1.8)
"""Least change of all gradients, in log units: a sum over two ranks in place of their mean is a factor of two."""

FEWEST_TENSORS: Final = 6
"""Gradients among which one factor can be told from a change of some."""

FEW_ELEMENTS: Final = 4
"""Elements below which the norm of a gradient is noise."""

RECENT: Final = 24
"""Steps whose common level, spread and loss are remembered, and that must have passed."""

YOUNG: Final = 50
"""Steps of a run in which no change begins: as a first plateau ends, all gradients grow together. Those of a GPT under
SGD grew 4.8-fold at step 24, with the loss as it was."""

MEMORY: Final = 12.0
"""Steps over which the usual size of each gradient is averaged."""

WAIT: Final = 7
"""Steps that a change must last, with the step in which it came: batches swing, and a spike passes."""

DEVIATIONS: Final = 4.0
"""Least change of the level's mean, in standard deviations of its swings before, which are not independent. Healthy
runs had 2.3."""

UNIFORM: Final = 1.5
"""Multiple of the usual spread over the tensors that a change by one factor may have."""

RESIZED: Final = 1.25
"""Factor by which the model's inputs may be larger or smaller than those of recent steps: where sequences are sorted by
length, each epoch begins with short ones, whose gradients are larger."""

LOSS_MARGIN: Final = 0.25
"""Share of the recent losses' range by which the loss of the step may lie beyond them."""

AT_ONCE: Final = 0.6
"""Least share of the change, in log units, that its first step has: what training does grows over some steps."""

SAME_FACTOR: Final = 0.2
"""Most by which a fall of the loss may differ from that of all gradients, and by which the loss may rise where it is to
stay, in log units: losses of batches swing."""

FIRST: Final = 2
NEWEST: Final = 4
SWINGS: Final = 1.6
"""First steps of a change whose losses are compared, steps before it whose median loss is the usual one, and how much
of the median move from one step to the next is added to what it may rise by: of normal swings, two standard deviations
of the difference of both medians."""


class GradientScaleRule(Rule):
    """Follows the common level of all gradients: the median, over tensors, of the log of norm ÷ usual norm.

    A loss that is not divided by the micro-steps, a sum in place of a mean, or a scale that is not taken back
    multiplies every gradient by one factor in one step, and leaves that step's loss as it was. What training does
    changes layers differently, over several steps, or shows in the loss first. Found are lasting changes, later. A
    fall is one where the loss falls by the same factor: it is divided once more. Alone it is none: those of a vision
    transformer fell sixfold in a step of healthy training, with the loss as it was. A growth after the learning rate
    rose is none: those of an autoencoder grew 2.85-fold a step after its schedule's restart, which makes the rate
    twenty times larger.
    """

    name: ClassVar[str] = "gradient_scale"
    quantities: ClassVar[frozenset[str]] = frozenset({GRADIENT, ACTIVATION_INPUT, "loss", *DECLARED, *RATES})
    statistics: ClassVar[frozenset[str]] = frozenset({"norm"})

    def __init__(self, arrays: SeriesArrays) -> None:
        self._is_gradient = arrays.series.column(bool, of=lambda s: s.quantity == GRADIENT and not s.micro_step)
        self._is_loss = arrays.series.column(bool, of=is_loss)
        self._is_input = arrays.series.column(bool, of=lambda s: s.is_model_input)
        self._rates, self._declared = arrays.shared(RateChanges), arrays.shared(DeclaredChanges)
        self._usual = arrays.series.column(np.float64, np.nan)
        self._levels: deque[tuple[float, float, float]] = deque(maxlen=RECENT)
        self._sizes: deque[float] = deque(maxlen=RECENT)
        self._size = 0.0
        self._since: list[tuple[float, float]] = []  # the levels and the losses from a leap on
        self._onset = self._step = -1
        self._ids: list[Integers] = []
        self._logs: list[Floats] = []
        self._loss = math.nan
        self._excused = False
        self._first: tuple[int, int] = (-1, 0)
        self._age = 0

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the change that has lasted; a step may come in several records, and is judged after its last one."""
        record = observed.record
        found: list[Finding] = []
        if record.step != self._step:
            found = self._end_step()
            self._step, self._loss, self._excused, self._ids, self._logs = record.step, math.nan, False, [], []
            self._size = 0.0
        self._size += float(observed.numel[self._is_input.values[record.where]].sum())
        self._rates.note(record)
        self._excused |= record.skipped or self._declared.ends_stretch(record)
        losses = record.values[self._is_loss.values[record.where], VALUE]
        self._loss = float(losses[-1]) if len(losses) else self._loss
        rows = rows_where(self._is_gradient.values[record.where] & (observed.numel >= FEW_ELEMENTS))
        norms = record.values[rows, NORM]
        rows = rows[(norms > 0) & np.isfinite(norms)]
        if len(rows):
            self._first = int(record.ids[rows[0]]), int(rows[0])
            self._ids.append(record.ids[rows].astype(np.int64))
            self._logs.append(np.log(record.values[rows, NORM]))
        return found

    def _end_step(self) -> list[Finding]:
        """Take in the step that has ended: its level, the spread over tensors, and its loss."""
        self._excused |= self._is_resized()
        if sum(map(len, self._ids)) < FEWEST_TENSORS or self._excused:
            if self._excused:
                self._forget()
            return []
        ids, logs = np.concatenate(self._ids), np.concatenate(self._logs)
        off = logs - self._usual.values[ids]
        known = off[np.isfinite(off)]
        level = float(medians(known[None])[0]) if len(known) >= FEWEST_TENSORS else 0.0
        spread = float(medians(np.abs(known - level)[None])[0]) if len(known) else 0.0
        if self._onset >= 0:
            return self._wait(ids, logs, level)
        if self._begins(level, spread):
            self._onset, self._since = self._step, [(level, self._loss)]
            return []
        self._age += 1
        self._learn(ids, logs)
        self._levels.append((level, spread, self._loss))
        return []

    def _is_resized(self) -> bool:
        """Take in the elements of the step's inputs; return whether they are far more or fewer than of late."""
        sizes, size = list(self._sizes), self._size
        if size == 0:
            return False
        self._sizes.append(size)
        return bool(sizes) and not min(sizes) / RESIZED <= size <= max(sizes) * RESIZED

    def _begins(self, level: float, spread: float) -> bool:
        """Whether the level leaps in this step, alike over the tensors, and the loss does not, or falls as far."""
        if len(self._levels) < RECENT or self._age < YOUNG or not math.isfinite(self._loss):
            return False
        if self._rates.rose_lately(self._step):
            return False
        levels, spreads, losses = zip(*self._levels, strict=True)
        moved = level - statistics.fmean(levels[-NEWEST:])
        known: list[float] = [loss for loss in losses if not math.isnan(loss)]
        if abs(moved) < LEAST_FACTOR or not known or spread > UNIFORM * max(statistics.median(spreads), 0.02):
            return False
        if moved < 0:
            return _fell_as_far(known[-NEWEST:], [self._loss], moved)
        low, high = min(known), max(known)
        margin = LOSS_MARGIN * (high - low)
        return low - margin <= self._loss <= high + margin

    def _wait(self, ids: Integers, logs: Floats, level: float) -> list[Finding]:
        """Follow a leap for some steps; return it once it has lasted."""
        self._since.append((level, self._loss))
        before = np.array(self._levels)
        mean, swings = float(before[:, 0].mean()), float(before[:, 0].std())
        since, losses = (list(each) for each in zip(*self._since, strict=True))
        falls = since[0] < mean
        spared = int(falls)  # a step of fewer micro-steps, at an epoch's end, may be divided as before
        moved = (statistics.median if falls else statistics.fmean)(since) - mean
        back = all(abs(x - mean) < LEAST_FACTOR / 2 for x in since[-1 - spared :])
        if not back and len(since) < WAIT:
            return []
        onset = self._onset
        self._forget()
        self._learn(ids, logs)
        lasting = sum((x - mean) / moved >= 1 / 2 for x in since)
        steady = lasting >= len(since) - spared and not _goes_on(since, falls=falls)
        steady &= abs(since[0] - mean) >= AT_ONCE * abs(moved)
        if back or not steady or abs(moved) < max(LEAST_FACTOR * 0.8, DEVIATIONS * swings):
            return []
        if not (_fell_as_far(before[:, 2].tolist(), losses, moved) if falls else _stays(before[:, 2], losses[:FIRST])):
            return []
        detail = (SHIFT, self.name, "norm", math.exp(moved), 1.0, SCORE)
        return [Finding(self._first[0], self._first[1], *detail, step=onset, last_clean=onset - 1, passed_on=False,
                        name=ALL)]  # fmt: skip

    def _learn(self, ids: Integers, logs: Floats) -> None:
        usual = self._usual.values[ids]
        self._usual.values[ids] = np.where(np.isnan(usual), logs, usual + (logs - usual) / MEMORY)

    def _forget(self) -> None:
        """Begin anew: the usual sizes are learned again."""
        self._levels.clear()
        self._usual.values[:] = np.nan
        self._onset, self._since = -1, []

    @staticmethod
    def sentence(anomaly: Anomaly, _subject: str) -> str:
        """Return the factor, and what it may come from."""
        if anomaly.value < 1:
            return (
                f"the loss and all gradients are {1 / anomaly.value:.3g} times smaller from step {anomaly.step} on, by "
                "one factor: the loss is divided once more, as by micro-steps that it is divided by already"
            )
        return (
            f"all gradients are {anomaly.value:.3g} times larger from step {anomaly.step} on, by one factor, while the "
            "loss of that step is as usual: a division by micro-steps, ranks or a loss scale is missing"
        )


def _fell_as_far(before: list[float], since: list[float], moved: float) -> bool:
    """Return whether the median loss changed by a factor, given as its log."""
    usual, now = (statistics.median(x for x in losses if not math.isnan(x)) for losses in (before, since))
    return 0 < usual < math.inf and 0 < now < math.inf and abs(math.log(now / usual) - moved) <= SAME_FACTOR


def _stays(before: Floats, since: list[float]) -> bool:
    """Return whether the loss does not rise from the steps right before to the first ones; it falls by and by.

    Gradients of training without clipping grow at the edge of stability, and the loss rises with them. Where a division
    is missing, it rises after the first updates at the earliest.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        logs, newest = np.log(before[~np.isnan(before)]), np.log([x for x in since if not math.isnan(x)])
    if not (np.isfinite(logs).all() and np.isfinite(newest).all()) or len(logs) <= NEWEST or not len(newest):
        return True
    swings = float(np.median(np.abs(np.diff(logs))))
    return float(np.median(newest) - np.median(logs[-NEWEST:])) <= SAME_FACTOR + SWINGS * swings


def _goes_on(levels: list[float], *, falls: bool) -> bool:
    """Return whether gradients go on as they leapt, by as much again: a plateau has ended."""
    further = statistics.fmean(levels[-3:]) - statistics.fmean(levels[:3])
    return (-further if falls else further) >= LEAST_FACTOR
