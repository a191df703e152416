"""What rules on optimizers know of the optimizer: its options, and numbers of each parameter."""

import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from trainsentry.anomaly.rules.rule import Observed
from trainsentry.anomaly.series_arrays import Floats, Integers, SeriesArrays, rows_where
from trainsentry.collectors.series import FOUND_INF, GRADIENT, NO_OPTION, Series, option_parts
from trainsentry.collectors.statistics import VALUE

RATE: Final = "lr"
_LINEAR: Final = frozenset({"momentum", "dampening", "nesterov"})
"""The options of SGD."""

_NOT_LINEAR: Final = frozenset({"alpha", "betas.0", "ns_steps", "trust_coefficient"})
"""Options that show RMSprop, Adam's kind, Muon and LARS."""


class RecordedOptions:
    """The options of all groups of all optimizers, as they were last recorded: a row comes where one changes."""

    def __init__(self, arrays: SeriesArrays) -> None:
        self._is_option = arrays.series.column(bool, of=lambda s: s.scalar and option_parts(s.name) is not None)
        self._skips = arrays.series.column(bool, of=lambda s: s.scalar and s.name == FOUND_INF)
        self._again = arrays.series.column(bool, of=lambda s: s.quantity == GRADIENT and s.micro_step > 0)
        self._groups: dict[tuple[int, int], dict[str, float]] = {}

    def note(self, observed: Observed) -> None:
        """Take in a record's options."""
        record = observed.record
        for row in rows_where(self._is_option.values[record.where]).tolist():
            parts = option_parts(observed.table.series[record.ids[row]].name)
            value = float(record.values[row, VALUE])
            if parts is not None and value == NO_OPTION:
                self._groups.setdefault(parts[:2], {}).pop(parts[2], None)
            elif parts is not None:
                self._groups.setdefault(parts[:2], {})[parts[2]] = value

    def skips(self, observed: Observed) -> bool:
        """Whether the loss scaler skips the update of a record's step."""
        record = observed.record
        return record.skipped or bool((record.values[self._skips.values[record.where], VALUE] > 0).any())

    @property
    def several(self) -> bool:
        """Whether there are several optimizers: the scaler may skip one of them alone."""
        return len({optimizer for optimizer, _ in self._groups}) > 1

    def updates_again(self, observed: Observed) -> bool:
        """Whether an optimizer updates more than once in a record's step, so that one gradient is not all."""
        return bool(self._again.values[observed.record.where].any())

    def groups(self) -> Iterator[dict[str, float]]:
        """Yield the options of each group that has a learning rate."""
        return (group for group in self._groups.values() if RATE in group)

    def linear_groups(self) -> list[dict[str, float]]:
        """Return the options of the groups of SGD, whose updates are linear in gradients and momentum."""
        return [group for group in self.groups() if group.keys() >= _LINEAR and not _NOT_LINEAR & group.keys()]

    def one(self, key: str) -> float:
        """Return the value of an option, NaN where groups differ in it or none has it."""
        values = {group[key] for group in self._groups.values() if key in group}
        return values.pop() if len(values) == 1 else math.nan

    def largest(self, key: str) -> float:
        """Return the largest value of an option, 0 where no group has it."""
        return max((group[key] for group in self._groups.values() if key in group), default=0.0)


class ParameterNumbers:
    """Numbers the parameters that series belong to, by stage and name."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, str], int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def of(self, series: Series) -> int:
        """Return the number of the parameter of a series; its quantity is not looked at."""
        return self._numbers.setdefault((series.vpp_stage, series.name), len(self._numbers))


class ByParameter:
    """Arrays with an element for each parameter, shape (lines, parameters); NaN where nothing is known."""

    def __init__(self, lines: int) -> None:
        self.values = np.full((lines, 0), np.nan)

    def set(self, owners: Integers, values: Floats) -> None:
        """Set the elements of some parameters, shape (lines, n)."""
        if len(owners):
            self.grow(int(owners.max()) + 1)
            self.values[:, owners] = values

    def get(self, owners: Integers) -> Floats:
        """Return the elements of some parameters, shape (lines, n)."""
        self.grow(int(owners.max(initial=-1)) + 1)
        found: Floats = self.values[:, owners]
        return found

    def clear(self) -> None:
        """Forget all."""
        self.values[:] = np.nan

    def grow(self, size: int) -> None:
        """Make room for so many parameters, which a run names in its first steps."""
        lines, known = self.values.shape
        if size > known:
            self.values = np.concatenate((self.values, np.full((lines, size - known), np.nan)), axis=1)
