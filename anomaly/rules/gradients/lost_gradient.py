"""An output of a module on which the loss depends no more: an auxiliary loss that got lost, a part that is detached."""

from collections.abc import Collection
from typing import ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import GRADIENT_FLOW, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.gradients.absences import Absences, Bounds
from trainsentry.anomaly.rules.gradients.module_outputs import ModuleOutputs, OutputGradient
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.rules.scalars.declared_changes import DECLARED, DeclaredChanges
from trainsentry.anomaly.series_arrays import Integers, SeriesArrays
from trainsentry.collectors.series import ACTIVATION_GRAD_OUTPUT, ACTIVATION_OUTPUT

SCORE: Final = 60.0
"""Deviations: above every spike of healthy runs, as a gradient that does not come is no estimate."""

BOUNDS: Final = Bounds(had_before=12, fewest=2, chance=1e-5, faded=0.35)
"""Some losses are added while a training begins. A batch may have no example of a task, and a task may be drawn by lot:
four samples without it after 25 that had it are none of chance, three after 50. A weight that falls to zero by a line
has a last gradient of a quarter of the median of eight."""


class LostGradientRule(Rule):
    """Follows which outputs of a module get a gradient, where a module has several.

    Only an output whose module gives it out as before, and whose other outputs still get gradients, counts: then the
    backward pass comes to the module, and nothing comes from what was made of this output. Where a module gets no
    gradient at all, its parameters tell of it. A declared change, and a return to an earlier step, begin anew. A step
    is judged when the next one begins. A gradient that is exactly zero as a whole does not come: its loss has the
    weight 0.
    """

    name: ClassVar[str] = "lost_gradient"
    quantities: ClassVar[frozenset[str]] = frozenset({ACTIVATION_OUTPUT, ACTIVATION_GRAD_OUTPUT, *DECLARED})
    statistics: ClassVar[frozenset[str]] = frozenset({"norm"})

    def __init__(self, arrays: SeriesArrays) -> None:
        self._declared = arrays.shared(DeclaredChanges)
        self._outputs, self._absences = ModuleOutputs(arrays), Absences(arrays, BOUNDS)
        self._step = -1

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the outputs that get no gradient any more; a step may come in several records."""
        record, found = observed.record, []
        if record.step < self._step:
            self._absences.begin_anew()
        elif record.step > self._step:
            found = self._end_step()
        if record.step != self._step:
            self._step = record.step
            self._outputs.begin_step()
        if self._declared.ends_stretch(record):
            self._absences.begin_anew()
        self._outputs.note(record)
        return found

    def _end_step(self) -> list[Finding]:
        """Take in the gradients of the step that has ended."""
        came: list[OutputGradient] = []
        away: list[OutputGradient] = []
        for output in self._outputs.with_gradients():
            if self._outputs.has_gradient(output):
                came.append(output)
            elif output.gradient_id >= 0 and self._outputs.was_computed(output):
                away.append(output)
        norms = np.array([self._outputs.norm(output) for output in came])
        self._absences.come(_gradient_ids(came), norms, self._step)
        ids = _gradient_ids(away)
        self._absences.stay_away(ids, self._step)
        lost = self._absences.are_no_chance(ids)
        self._absences.tell(ids[lost])
        modules = {output.module for output, is_lost in zip(away, lost, strict=True) if is_lost}
        # What comes to no output of a module comes to none that is made inside it: the outer one is nearer to the loss.
        return [
            self._finding(output.gradient_id)
            for output, is_lost in zip(away, lost, strict=True)
            if is_lost and not _is_inside(output.module, modules)
        ]

    def _finding(self, series_id: int) -> Finding:
        since, newest = self._absences.steps(series_id)
        detail = (GRADIENT_FLOW, self.name, "given", 0.0, 1.0, SCORE)
        return Finding(series_id, -1, *detail, step=since, last_clean=newest, passed_on=False)

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return since when the loss does not depend on the output."""
        return (
            f"{subject} comes no more since step {anomaly.step}: the loss depends on this output no longer, although "
            "it is computed as before and other outputs of its module get gradients"
        )


def _gradient_ids(outputs: Collection[OutputGradient]) -> Integers:
    return np.array([output.gradient_id for output in outputs], np.int64)


def _is_inside(module: str, others: Collection[str]) -> bool:
    """Return whether a module lies inside one of the others."""
    return any(module != other and module.startswith(f"{other}." if other else "") for other in others)
