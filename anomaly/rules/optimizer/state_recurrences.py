"""The recurrences that states of optimizers follow, with the options of a run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from trainsentry.anomaly.rules.optimizer.recorded_options import RecordedOptions

MOST_WAYS: Final = 6
"""Ways that one state may follow: those of three groups that differ, each with and without decay of weights."""


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A state s' = decay·s + gain·g, or with g² where it is of `squares`.

    `decay` names the option, of which optimizers use one or another; without any the state is a plain sum. The gain is
    1 − decay, or with `keeps_gradient` 1 less what the option `dampening` says; without that option both are tried.
    With `counted` the option is the exponent of the gain: that is the number of the update, to its power. A state of
    `lines` holds means of g² along one of a matrix's axes, whose mean is that of all.
    """

    decay: tuple[str, ...]
    squares: bool = False
    keeps_gradient: bool = False
    counted: bool = False
    lines: bool = False


RECURRENCES: Final[Mapping[str, Recurrence]] = {
    "exp_avg": Recurrence(("betas.0",)),
    "exp_avg_sq": Recurrence(("betas.1",), squares=True),
    "momentum_buffer": Recurrence(("momentum",), keeps_gradient=True),
    "square_avg": Recurrence(("alpha", "rho"), squares=True),
    "grad_avg": Recurrence(("alpha",)),
    "sum": Recurrence((), squares=True),
    "accum": Recurrence((), squares=True),
    "row_var": Recurrence(("beta2_decay",), squares=True, counted=True, lines=True),
    "col_var": Recurrence(("beta2_decay",), squares=True, counted=True, lines=True),
    "variance": Recurrence(("beta2_decay",), squares=True, counted=True),
}
"""State by its name: Kingma and Ba, "Adam" (2015); Sutskever et al., "On the importance of initialization and momentum"
(2013); Duchi et al., "Adaptive Subgradient Methods" (2011); Zeiler, "ADADELTA" (2012); Shazeer and Stern, "Adafactor"
(2018); torch.optim's documentation of RMSprop (centred by `grad_avg`) and Muon; `accum` is what MindSpore calls the sum
of Adagrad."""


@dataclass(frozen=True, slots=True)
class Way:
    """Numbers of a recurrence in one group; `sign` is −1 where the optimizer climbs.

    Of a counted recurrence, `gain` is the exponent.
    """

    decay: float
    gain: float
    sign: float
    weight_decay: float


def ways_of(recurrence: Recurrence, options: RecordedOptions) -> list[Way]:
    """Return how a state may follow: the group of a parameter is not known, nor whether its weights decay inside."""
    found = dict.fromkeys(way for group in options.groups() for way in _ways_in(recurrence, group))
    return list(found)[:MOST_WAYS]


def _ways_in(recurrence: Recurrence, group: Mapping[str, float]) -> Iterator[Way]:
    decay = next((group[key] for key in recurrence.decay if key in group), None if recurrence.decay else 1.0)
    if decay is None:
        return
    if recurrence.counted:
        yield Way(0.0, decay, 1.0, 0.0)
        return
    gains = [1.0 - decay] if recurrence.decay else [1.0]
    if recurrence.keeps_gradient:
        gains = [1.0 - group["dampening"]] if "dampening" in group else [1.0, 1.0 - decay]
    sign = -1.0 if group.get("maximize") == 1 else 1.0
    for gain in gains:
        for weight_decay in dict.fromkeys((0.0, group.get("weight_decay", 0.0))):
            yield Way(decay, gain, sign, weight_decay)
