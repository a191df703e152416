"""An output of a module on which the loss depends no more: an auxiliary loss that got lost, a part that is detached."""

import statistics
from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import GRADIENT_FLOW, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.rules.scalars.declared_changes import DECLARED, DeclaredChanges
from trainsentry.anomaly.series_arrays import SeriesArrays
from trainsentry.collectors.series import ACTIVATION_GRAD_OUTPUT, ACTIVATION_OUTPUT, Series
from trainsentry.collectors.statistics import NORM

SCORE: Final = 60.0
"""Deviations: above every spike of healthy runs, as a gradient that does not come is no estimate."""

CHANCE: Final = 1e-5
"""Probability below which samples in a row without a gradient are no chance, such as a task that is drawn by lot: four
samples after 25 that had it, three after 50. The share of samples without one is taken from those before, by the rule
of succession (Laplace, 1814)."""

LONGER: Final = 3
"""The same as a multiple of the most so far: tasks may come in blocks."""

HAD_BEFORE: Final = 12
"""Samples that must have had the gradient: some losses are added while a training begins."""

FEWEST: Final = 2
"""Samples in a row without a gradient, however many had it: a batch may have no example of a task."""

RECENT: Final = 8
FADED: Final = 0.35
"""Newest gradients that are remembered, and the share of their middle norm below which the last one had faded: a weight
that a schedule takes to zero, the last of eight being a quarter of the middle one where it falls by a line."""

SEVERAL: Final = 2
"""Outputs of a module of which some get a gradient where one does not."""

_Output = tuple[int, str]
"""A part of a pipeline, and the name of an output."""


@dataclass(slots=True)
class _Gradient:
    """How many samples had the gradient of an output and how many had not; `gone` are the last, since step `since`."""

    series_id: int
    had: int = 0
    had_not: int = 0
    gone: int = 0
    longest: int = 0
    since: int = -1
    newest: int = -1
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def comes(self, step: int, norm: float) -> None:
        """Take in a sample that has the gradient."""
        self.norms.append(norm)
        self.longest = max(self.longest, self.gone)
        self.had_not, self.gone = self.had_not + self.gone, 0
        self.had, self.newest = self.had + 1, step

    def is_lost(self, step: int) -> bool:
        """Take in a sample without the gradient; return whether it is the first that is no chance any more."""
        before = self._is_no_chance()
        self.since = self.since if self.gone else step
        self.gone += 1
        return self._is_no_chance() and not before

    def _is_no_chance(self) -> bool:
        share = (self.had_not + 1) / (self.had + self.had_not + 2)
        least = max(FEWEST, LONGER * self.longest)
        if self.norms and self.norms[-1] < FADED * statistics.median(self.norms):
            return False
        return self.had >= HAD_BEFORE and self.gone >= least and share**self.gone < CHANCE


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
        self._output_of: dict[_Output, int] = {}
        self._modules: dict[tuple[int, str], dict[_Output, _Gradient]] = defaultdict(dict)
        self._with_several: dict[tuple[int, str], None] = {}  # few modules, in their order
        arrays.series.before_growth(self._note_new)
        self._in_step, self._norm = arrays.series.column(bool), arrays.series.column(np.float64)
        self._is_gradient = arrays.series.column(bool, of=lambda s: s.quantity == ACTIVATION_GRAD_OUTPUT)
        self._step = -1

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the outputs that get no gradient any more; a step may come in several records."""
        record, found = observed.record, []
        if record.step < self._step:
            self._forget()
        elif record.step > self._step:
            found = self._end_step()
        if record.step != self._step:
            self._step = record.step
            self._in_step.values[:] = False
        if self._declared.ends_stretch(record):
            self._forget()
        self._norm.values[record.ids] = record.columns[NORM]
        self._in_step.values[record.ids] = ~self._is_gradient.values[record.where] | (record.columns[NORM] != 0)
        return found

    def _end_step(self) -> list[Finding]:
        """Take in the gradients of the step that has ended."""
        came = self._in_step.values
        lost: dict[str, list[_Gradient]] = defaultdict(list)
        for place in self._with_several:
            module, outputs = place[1], self._modules[place]
            if not any(came[gradient.series_id] for gradient in outputs.values()):
                continue
            for output, gradient in outputs.items():
                if came[gradient.series_id]:
                    gradient.comes(self._step, float(self._norm.values[gradient.series_id]))
                elif came[self._output_of.get(output, gradient.series_id)] and gradient.is_lost(self._step):
                    lost[module].append(gradient)
        # What comes to no output of a module comes to none that is made inside it: the outer one is nearer to the loss.
        return [
            self._finding(g) for module, gradients in lost.items() if not _is_inside(module, lost) for g in gradients
        ]

    def _forget(self) -> None:
        """Begin anew."""
        for outputs in self._modules.values():
            outputs.update((output, _Gradient(gradient.series_id)) for output, gradient in outputs.items())

    def _finding(self, gradient: _Gradient) -> Finding:
        detail = (GRADIENT_FLOW, self.name, "given", 0.0, 1.0, SCORE)
        where = {"step": gradient.since, "last_clean": gradient.newest, "passed_on": False}
        return Finding(gradient.series_id, -1, *detail, **where)  # type: ignore[arg-type]

    def _note_new(self, first: int, new: Sequence[Series]) -> None:
        for i, series in enumerate(new, first):
            output = series.vpp_stage, series.name
            if series.micro_step or "@" in series.name:  # further passes and calls may be for something else
                continue
            if series.quantity == ACTIVATION_OUTPUT:
                self._output_of[output] = i
            elif series.quantity == ACTIVATION_GRAD_OUTPUT:
                outputs = self._modules[series.vpp_stage, series.module]
                outputs.setdefault(output, _Gradient(i))
                if len(outputs) == SEVERAL:
                    self._with_several[series.vpp_stage, series.module] = None

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return since when the loss does not depend on the output."""
        return (
            f"{subject} comes no more since step {anomaly.step}: the loss depends on this output no longer, although "
            "it is computed as before and other outputs of its module get gradients"
        )


def _is_inside(module: str, others: Collection[str]) -> bool:
    """Return whether a module lies inside one of the others."""
    return any(module != other and module.startswith(f"{other}." if other else "") for other in others)
