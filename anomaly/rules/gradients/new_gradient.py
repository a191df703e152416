"""An output that no gradient ever came to and one comes to now: a `detach` or a stop-gradient that got lost."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import GRADIENT_FLOW, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.rules.scalars.declared_changes import DECLARED, DeclaredChanges
from trainsentry.anomaly.series_arrays import SeriesArrays
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import ACTIVATION_GRAD_OUTPUT, ACTIVATION_OUTPUT, GRADIENT, Series
from trainsentry.collectors.statistics import NORM

SCORE: Final = 58.0
"""Deviations: above every spike of healthy runs, below a gradient that is lost."""

NONE_BEFORE: Final = 15
"""Samples without a gradient, from the run's first one on: losses that are added while a training begins are meant."""

COMES: Final = 3
"""Samples in a row with it: a loss on one batch in a hundred is no path that is open."""

SEVERAL: Final = 2
"""Outputs of a module of which some get a gradient where one does not."""

_Place = tuple[int, str]
"""A part of a pipeline, and the name of a module or an output."""


@dataclass(slots=True)
class _Output:
    """The series of an output and of its gradient; samples without a gradient, and with it since step `since`."""

    series_id: int
    gradient_id: int = -1
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
        self._outputs: dict[_Place, _Output] = {}
        self._modules: dict[_Place, list[_Output]] = defaultdict(list)
        self._with_several: list[list[_Output]] = []
        arrays.series.before_growth(self._note_new)
        self._in_step, self._had_gradient = arrays.series.column(bool), arrays.series.column(bool)
        self._is_gradient = arrays.series.column(bool, of=lambda s: s.quantity == GRADIENT)
        self._counts_if_any = arrays.series.column(bool, of=lambda s: s.quantity == ACTIVATION_GRAD_OUTPUT)
        self._step = self._first_gradient_at = -1

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the outputs that get a gradient as they never did; a step may come in several records."""
        record, found = observed.record, []
        if record.step < self._step or self._declared.ends_stretch(record):
            self._outputs_begin_anew()
        elif record.step > self._step:
            found = self._end_step()
        if record.step != self._step:
            self._step = record.step
            self._in_step.values[:] = False
        self._note_first_gradients(record)
        self._in_step.values[record.ids] = ~self._counts_if_any.values[record.where] | (record.columns[NORM] != 0)
        return found

    def _note_first_gradients(self, record: StepRecord) -> None:
        ids = record.ids[self._is_gradient.values[record.where]]
        if not self._had_gradient.values[ids].all():
            self._first_gradient_at = record.step
        self._had_gradient.values[ids] = True

    def _end_step(self) -> list[Finding]:
        """Take in the step that has ended."""
        came, found = self._in_step.values, []
        for outputs in self._with_several:
            if not any(o.gradient_id >= 0 and came[o.gradient_id] for o in outputs):
                continue
            for output in outputs:
                if not came[output.series_id]:
                    continue
                if output.gradient_id < 0 or not came[output.gradient_id]:
                    output.without, output.comes, output.before = output.without + 1, 0, self._step
                elif self._begins(output):
                    found.append(self._finding(output))
        return found

    def _begins(self, output: _Output) -> bool:
        """Take in a gradient; return whether it is the last that was needed."""
        if output.without < NONE_BEFORE:
            output.without = -np.iinfo(np.int32).max  # it had one early: what comes later is nothing new
            return False
        if not output.comes:
            output.since = self._step
            output.is_thawed = output.before < self._first_gradient_at <= self._step
        output.comes += 1
        return output.comes == COMES and not output.is_thawed

    def _outputs_begin_anew(self) -> None:
        for output in self._outputs.values():
            output.without = output.comes = 0

    def _finding(self, output: _Output) -> Finding:
        detail = (GRADIENT_FLOW, self.name, "given", 1.0, 0.0, SCORE)
        where = {"step": output.since, "last_clean": output.before, "passed_on": False}
        return Finding(output.gradient_id, -1, *detail, **where)  # type: ignore[arg-type]

    def _note_new(self, first: int, new: Sequence[Series]) -> None:
        for i, series in enumerate(new, first):
            if series.micro_step or "@" in series.name:  # further passes and calls may be for something else
                continue
            place = series.vpp_stage, series.name
            if series.quantity == ACTIVATION_OUTPUT:
                self._outputs[place] = _Output(i)
                outputs = self._modules[series.vpp_stage, series.module]
                outputs.append(self._outputs[place])
                if len(outputs) == SEVERAL:
                    self._with_several.append(outputs)
            elif series.quantity == ACTIVATION_GRAD_OUTPUT and place in self._outputs:
                self._outputs[place].gradient_id = i

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return since when the loss depends on the output."""
        return (
            f"{subject} comes since step {anomaly.step}, and never came before: the loss depends on this output as it "
            "never did, as where a detach or a stop-gradient is lost"
        )
