"""Counts how often an optimizer's gradients were written in place before its update, without reading their values."""

import weakref
from itertools import takewhile
from typing import Final

from torch import Tensor
from torch.optim import Optimizer

from trainsentry.collectors.series import GRADIENT_WRITES, STALE_UPDATE, Series
from trainsentry.collectors.torch.hooks.compiler import has_compiled
from trainsentry.collectors.torch.parameters.gradient_versions import GradientVersions
from trainsentry.collectors.torch.rows.local_tensor import version_of
from trainsentry.collectors.torch.rows.step_rows import StepRows
from trainsentry.collectors.torch.sharding.model_names import ModelNames

MOST_LOOKED_AT: Final = 64
"""Parameters among which the first gradient is looked for; the rest may be unused in this step."""

LEAST_UPDATES: Final = 20
"""Updates whose counts a checkpoint remembers: loops that clip only large gradients have shown both by then."""

MOST_COUNTS: Final = 4
"""Counts that a training loop has: the first update's, those with and without a clip. More say nothing of it."""


class GradientWrites:
    """Appends `gradient_writes.<optimizer>` where it differs from the update before, and `stale_update.<optimizer>`.

    Autograd accumulates a gradient in place once for each micro-step after the first; unscaling and clipping write once
    more each. torch counts these writes in the tensor's version. What remains without the micro-steps is the same at
    every update of a training loop, unless gradients are kept from the step before, accumulated twice, zeroed between
    micro-steps, or no longer clipped. One that is written more often than the others has a row of its own. Compiled
    code writes as its compiler likes, so beside it nothing is counted.
    """

    def __init__(self, rows: StepRows, names: ModelNames) -> None:
        self.rows = rows
        self.names = names
        self._known: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._last: weakref.WeakKeyDictionary[Optimizer, tuple[weakref.ref[Tensor], int]] = weakref.WeakKeyDictionary()
        self._versions: weakref.WeakKeyDictionary[Optimizer, GradientVersions] = weakref.WeakKeyDictionary()
        self._modules: weakref.WeakKeyDictionary[Optimizer, str] = weakref.WeakKeyDictionary()
        self._optimizers = 0
        self._counts: list[int] = []
        self._updates = 0

    def every_count(self) -> str:
        """Return every count of an only optimizer as a text; empty where they say nothing of the next run.

        That is so before some updates, where counts are many, and where the first is above the second: then gradients
        are kept, and it counts what was written before the model was watched.
        """
        counts = self._counts
        few = self._updates >= LEAST_UPDATES and len(counts) <= MOST_COUNTS
        return _text(counts) if few and counts[0] == min(counts) else ""

    def newest_count(self) -> str:
        """Return the count of the newest update as a text; empty where it was not counted."""
        return _text([writes for _, writes in self._known.values()]) if len(self._known) == 1 else ""

    def close(self) -> None:
        """Take away what is hooked."""
        for versions in self._versions.values():
            versions.close()

    def read(self, optimizer: Optimizer, micro_steps: int) -> None:
        """Count the writes before an update that `micro_steps` backward passes precede."""
        gradient = _first_gradient(optimizer)
        version = None if gradient is None else version_of(getattr(gradient, "_local_tensor", gradient))
        if gradient is None or version is None or has_compiled():
            return
        last = self._last.get(optimizer)
        # Also where no pass was seen: the next count starts here.
        self._last[optimizer] = weakref.ref(gradient), version
        kept = last is not None and last[0]() is gradient
        if not micro_steps:
            if kept and last is not None and last[1] == version and optimizer in self._known:
                self._add(f"{STALE_UPDATE}.{self._known[optimizer][0]}", 1.0, optimizer)
            return
        self._updates += 1
        writes = version - (last[1] if kept and last is not None else 0) - (micro_steps - 1)
        if optimizer not in self._known:
            self._known[optimizer], self._optimizers = (self._optimizers, writes), self._optimizers + 1
            self._append(optimizer, writes)
        elif self._known[optimizer][1] != writes:
            self._append(optimizer, writes)
        if not kept:
            self._read_each(optimizer)

    def _read_each(self, optimizer: Optimizer) -> None:
        """Tell of single gradients that are written more often than the others."""
        found = self._versions.setdefault(optimizer, GradientVersions()).read(optimizer)
        known = self.names.by_parameter() if found else {}
        for parameter, more in found:
            for named in known.get(parameter, ())[:1]:
                name = f"{GRADIENT_WRITES}.{self._known[optimizer][0]}.{named.name}"
                series = Series(name, name, module=named.module, scalar=True)
                self.rows.add_scalar(self.rows.table.series_id(series), float(more))

    def _append(self, optimizer: Optimizer, writes: int) -> None:
        number, _ = self._known[optimizer]
        self._known[optimizer] = number, writes
        if writes not in self._counts and len(self._counts) <= MOST_COUNTS:
            self._counts.append(writes)
        self._add(f"{GRADIENT_WRITES}.{number}", float(writes), optimizer)

    def _add(self, name: str, value: float, optimizer: Optimizer) -> None:
        """Append a scalar; of one of several optimizers, it belongs to the module whose parameters that one has."""
        if self._optimizers > 1 and optimizer not in self._modules:  # looking at all parameters takes its time
            self._modules[optimizer] = _module_of(optimizer, self.names)
        module = self._modules.get(optimizer, "")
        self.rows.add_scalar(self.rows.table.series_id(Series(name, name, module=module, scalar=True)), value)


def _text(counts: list[int]) -> str:
    return " ".join(map(str, sorted(counts)))


def _module_of(optimizer: Optimizer, names: ModelNames) -> str:
    """Return the innermost module that holds all parameters of an optimizer, "" for the model."""
    known = names.by_parameter()
    owned = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, Tensor)]
    modules = [named.name.split(".")[:-1] for p in owned for named in known.get(p, ())]
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*modules, strict=False))
    return ".".join(parts[0] for parts in shared)


def _first_gradient(optimizer: Optimizer) -> Tensor | None:
    """Return the first gradient of an optimizer, the very tensor: what it is tells whether it was kept."""
    looked_at = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, Tensor) and parameter.grad is not None:
                return parameter.grad
            looked_at += 1
            if looked_at >= MOST_LOOKED_AT:
                return None
    return None
