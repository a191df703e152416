"""Detects modules and parameters that are added to a model after `watch`."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, Final

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim import Optimizer

from trainsentry.collectors.guard import Guard
from trainsentry.collectors.torch.parameters.readers import parameters_of
from trainsentry.collectors.torch.sharding.model_names import ModelNames

IN_VAIN: Final = 3
"""Counts in vain, of steps in which a parameter was registered somewhere, after which only every hundredth looks:
wrappers register parameters in each pass."""

LOOK_EVERY: Final = 100
"""Steps between two counts of the modules and their parameters, which take 10 ms for 5,000 modules; what an optimizer
receives shows at once."""

_registered = [0]
"""How many parameters modules of this process have received since a model was first watched."""


@functools.cache
def _count_registrations() -> None:
    """Count registered parameters from now on: the hook stays, as torch iterates over its hooks while it calls them."""
    register_module_parameter_registration_hook(_note_registration)


def _note_registration(*_: Any) -> None:
    _registered[0] += 1


class AddedModules:
    """Detects that a watched model has grown: an adapter, a new head, layers that are unfrozen one by one."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self._watched: list[tuple[Sequence[nn.Module], list[Any]]] = []
        self._modules = (0, 0)
        self._optimizers: list[Optimizer] = []
        self._parameters: list[int] = []
        self._steps = self._in_vain = 0
        _count_registrations()
        self._seen = _registered[0]

    def note_watched(
        self, chunks: Sequence[nn.Module], holders: Sequence[Any], optimizers: Iterable[Optimizer]
    ) -> None:
        """Note what a call of `watch` has added; `optimizers` are those whose parameters no wrapper flattens."""
        self._watched.append((chunks, list(holders)))
        self._modules = self._count_modules()
        self._optimizers += optimizers
        self._parameters = self._count_parameters()

    def note_optimizer(self, optimizer: Optimizer) -> None:
        """Note an optimizer that came after `watch`."""
        for _, holders in self._watched:
            holders.append(optimizer)
        self._optimizers.append(optimizer)
        self._parameters = self._count_parameters()

    def all_names(self) -> ModelNames:
        """Return the names of all that is in the watched models now."""
        names = ModelNames()
        for chunks, holders in self._watched:
            names.add(chunks, holders)
        return names

    def new_names(self, known: ModelNames) -> ModelNames | None:
        """Return all current names when something was added, else None; call it once a step.

        Warns once when an optimizer has received parameters of modules that are not watched.
        """
        self._steps += 1
        before, self._parameters = self._parameters, self._count_parameters()
        grown = any(now > then for now, then in zip(self._parameters, before, strict=True))
        looks, self._seen = self._seen != _registered[0] and self._in_vain < IN_VAIN, _registered[0]
        if not grown and ((self._steps % LOOK_EVERY and not looks) or self._count_modules() == self._modules):
            self._in_vain += looks
            return None
        self._modules = self._count_modules()
        names = self.all_names()
        if grown:
            self._warn_unwatched(names)
        before_ids = {id(m.module) for m in known.modules} | {id(p.parameter) for p in known.parameters}
        now_ids = {id(m.module) for m in names.modules} | {id(p.parameter) for p in names.parameters}
        return names if now_ids - before_ids else None

    def _warn_unwatched(self, names: ModelNames) -> None:
        owned = names.by_parameter()
        unwatched = sum(p not in owned for optimizer in self._optimizers for p in parameters_of(optimizer))
        if unwatched:
            self.guard.warn_once(
                "added parameters",
                f"an optimizer has received {unwatched} parameters of modules that are not watched; call watch() with "
                "those modules to record them.",
            )

    def _count_modules(self) -> tuple[int, int]:
        """Return the number of modules, and that of different parameters: a tie may be cut."""
        chunks = [chunk for chunks, _ in self._watched for chunk in chunks]
        return sum(1 for c in chunks for _ in c.modules()), sum(1 for c in chunks for _ in c.parameters())

    def _count_parameters(self) -> list[int]:
        return [sum(len(group["params"]) for group in optimizer.param_groups) for optimizer in self._optimizers]
