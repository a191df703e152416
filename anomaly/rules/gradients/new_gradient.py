"""An output that no gradient ever came to and one comes to now: a `detach` or a stop-gradient that got lost."""

from collections import defaultdict
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import GRADIENT_FLOW, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.gradients.module_outputs import ModuleOutputs, OutputGradient
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.rules.scalars.declared_changes import DECLARED, DeclaredChanges
from trainsentry.anomaly.series_arrays import SeriesArrays
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import ACTIVATION_GRAD_OUTPUT, ACTIVATION_OUTPUT, GRADIENT

SCORE: Final = 58.0
"""Deviations: above every spike of healthy runs, below a gradient that is lost."""

NONE_BEFORE: Final = 15
"""Samples without a gradient, from the run's first one on: losses that are added while a training begins are meant."""

COMES: Final = 3
"""Samples in a row with it: a loss on one batch in a hundred is no path that is open."""


@dataclass(slots=True)
class _Stretch:
    """How many samples of an output had no gradient, and how many have had one since step `since`."""

    without: int = 0
    comes: int = 0
    since: int = -1
    before: int = -1
    is_thawed: bool = False


class NewGradientRule(Rule):
    """Follows the outputs of modules that give several, of which some get a gradient and others never did.

    Where a gradient begins to come to one of the others, the loss depends on it as it never did. Layers that are thawed
    and losses with parameters of their own bring parameters their first gradient in that step too; then nothing is
    said, nor where a change is declared. A step is judged when the next one begins.
    """

    name: ClassVar[str] = "new_gradient"
    quantities: ClassVar[frozenset[str]] = frozenset({ACTIVATION_OUTPUT, ACTIVATION_GRAD_OUTPUT, GRADIENT, *DECLARED})
    statistics: ClassVar[frozenset[str]] = frozenset({"norm"})

    def __init__(self, arrays: SeriesArrays) -> None:
        self._declared = arrays.shared(DeclaredChanges)
        self._outputs = ModuleOutputs(arrays)
        self._stretches: dict[OutputGradient, _Stretch] = defaultdict(_Stretch)
        self._had_gradient = arrays.series.column(bool)
        self._is_gradient = arrays.series.column(bool, of=lambda s: s.quantity == GRADIENT)
        self._step = self._first_gradient_at = -1

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the outputs that get a gradient as they never did; a step may come in several records."""
        record, found = observed.record, []
        if record.step < self._step or self._declared.ends_stretch(record):
            self._stretches.clear()
        elif record.step > self._step:
            found = self._end_step()
        if record.step != self._step:
            self._step = record.step
            self._outputs.begin_step()
        self._note_first_gradients(record)
        self._outputs.note(record)
        return found

    def _note_first_gradients(self, record: StepRecord) -> None:
        ids = record.ids[self._is_gradient.values[record.where]]
        if not self._had_gradient.values[ids].all():
            self._first_gradient_at = record.step
        self._had_gradient.values[ids] = True

    def _end_step(self) -> list[Finding]:
        """Take in the step that has ended."""
        found = []
        for output in self._outputs.with_gradients():
            if not self._outputs.was_computed(output):
                continue
            stretch = self._stretches[output]
            if not self._outputs.has_gradient(output):
                stretch.without, stretch.comes, stretch.before = stretch.without + 1, 0, self._step
            elif self._begins(stretch):
                detail = (GRADIENT_FLOW, self.name, "given", 1.0, 0.0, SCORE)
                where = {"step": stretch.since, "last_clean": stretch.before, "passed_on": False}
                found.append(Finding(output.gradient_id, -1, *detail, **where))  # type: ignore[arg-type]
        return found

    def _begins(self, stretch: _Stretch) -> bool:
        """Take in a gradient; return whether it is the last that was needed."""
        if stretch.without < NONE_BEFORE:
            stretch.without = -np.iinfo(np.int32).max  # it had one early: what comes later is nothing new
            return False
        if not stretch.comes:
            stretch.since = self._step
            stretch.is_thawed = stretch.before < self._first_gradient_at <= self._step
        stretch.comes += 1
        return stretch.comes == COMES and not stretch.is_thawed

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return since when the loss depends on the output."""
        return (
            f"{subject} comes since step {anomaly.step}, and never came before: the loss depends on this output as it "
            "never did, as where a detach or a stop-gradient is lost"
        )
