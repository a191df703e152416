"""Reads the numbers in an optimizer's parameter groups at every step: learning rate, betas, decay and the rest."""

import weakref
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from trainsentry.collectors.series import NO_OPTION, OWN_STEP, Series, option_name
from trainsentry.collectors.torch.device.registry import device_of
from trainsentry.collectors.torch.rows.step_rows import StepRows

MOST_GROUPS: Final = 64
"""Groups of an optimizer whose numbers are read, 0.1 ms a step: some programs make a group for each parameter."""


RATE: Final = "lr"
OWN_UPDATES: Final = 10
"""First updates of an optimizer after which its numbers are read again. What its own step has written, but for the
learning rate, is its state and no option: the distances that Prodigy estimates, the weights that schedule-free
optimizers add up."""


def options_of(group: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the names and numbers of a parameter group; each number of a pair such as `betas` has a name of its own.

    A tensor counts where it is in host memory: reading it elsewhere would wait for the device.

    >>> dict(options_of({"params": [], "lr": 0.1, "betas": (0.9, 0.99), "fused": None, "maximize": False}))
    {'lr': 0.1, 'betas.0': 0.9, 'betas.1': 0.99, 'maximize': 0.0}
    """
    for key, value in group.items():
        if isinstance(value, (bool, int, float, np.number)):
            yield key, float(value)
        elif isinstance(value, tuple):
            for i, number in enumerate(value):
                if isinstance(number, (int, float, np.number)):
                    yield f"{key}.{i}", float(number)
        elif isinstance(value, Tensor) and value.numel() == 1 and device_of(value).on_host:
            yield key, float(value.detach())


class OptionReader:
    """Appends a scalar for each option that differs from the step before; the first step appends all.

    Optimizers and their groups are numbered as they come. A group is known by its first parameter: loading a checkpoint
    replaces the groups, and some wrappers show an optimizer one group at a time. Numbers that an optimizer's step
    writes are left out, once it has.
    """

    def __init__(self, rows: StepRows) -> None:
        self.rows = rows
        self._known: weakref.WeakKeyDictionary[Optimizer, tuple[int, dict[int, _Group]]] = weakref.WeakKeyDictionary()
        self._optimizers = 0
        self._own: weakref.WeakKeyDictionary[Optimizer, set[str]] = weakref.WeakKeyDictionary()
        self._updates: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    def read(self, optimizer: Optimizer) -> None:
        """Read the options of an optimizer."""
        if optimizer not in self._known:
            self._known[optimizer], self._optimizers = (self._optimizers, {}), self._optimizers + 1
            if not str(getattr(type(optimizer).step, "__module__", "")).startswith("torch."):
                self._append(f"{OWN_STEP}.{self._optimizers - 1}", 1.0)
        number, known = self._known[optimizer]
        own = self._own.get(optimizer)
        for group in optimizer.param_groups[:MOST_GROUPS]:
            parameters = group["params"]
            key = id(parameters[0]) if parameters else 0
            place, before = known.get(key, (len(known), {}))
            now = dict(options_of(group))
            if own:
                now = {option: value for option, value in now.items() if option not in own}
            if now == before or place >= MOST_GROUPS:
                continue
            known[key] = place, now
            for option, value in now.items():
                if before.get(option) != value:
                    self._append(option_name(number, place, option), value)

    def updated(self, optimizer: Optimizer) -> None:
        """Note, after one of its first updates, which numbers the optimizer has written itself."""
        updates = self._updates.get(optimizer, 0)
        if updates == OWN_UPDATES or optimizer not in self._known:
            return
        self._updates[optimizer] = updates + 1
        number, known = self._known[optimizer]
        for group in optimizer.param_groups[:MOST_GROUPS]:
            place, before = known.get(id(group["params"][0]) if group["params"] else 0, (0, {}))
            now = dict(options_of(group))
            own = {option for option, value in before.items() if now.get(option, value) != value and option != RATE}
            for option in own:
                self._append(option_name(number, place, option), NO_OPTION)
            self._own.setdefault(optimizer, set()).update(own)

    def _append(self, name: str, value: float) -> None:
        series = Series(name, name, scalar=True)
        self.rows.add_scalar(self.rows.table.series_id(series), value)


_Group = tuple[int, dict[str, float]]
"""The number of a group, and its options in the step before."""
