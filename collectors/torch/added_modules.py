"""Modules and parameters that are added to a model after it was given to `watch`."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from torch import nn
from torch.optim import Optimizer

from trainsentry.collectors.guard import Guard
from trainsentry.collectors.torch.parameters.readers import parameters_of
from trainsentry.collectors.torch.sharding.model_names import ModelNames

LOOK_EVERY: Final = 100
"""Steps between two counts of the modules: 5 ms for 5,000 of them. Parameters show in the optimizer at once."""


class AddedModules:
    """Notices that a watched model has grown: an adapter, a new head, layers that are unfrozen one by one."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self._watched: list[tuple[Sequence[nn.Module], Sequence[Any]]] = []
        self._modules = 0
        self._optimizers: list[Optimizer] = []
        self._moved: list[int] = []
        self._steps = 0

    def took(self, chunks: Sequence[nn.Module], wrappers: Sequence[Any], optimizers: Iterable[Optimizer]) -> None:
        """Note what a call of `watch` has taken; `optimizers` are those that no wrapper lends flat parameters to."""
        self._watched.append((chunks, wrappers))
        self._modules = self._count_modules()
        self._optimizers += optimizers
        self._moved = self._count_moved()

    def new_names(self, known: ModelNames) -> ModelNames | None:
        """Return the names of everything that is there now, where something has been added; asked once a step.

        An optimizer that has got parameters of no watched module is told of once.
        """
        self._steps += 1
        before, self._moved = self._moved, self._count_moved()
        grown = any(now > then for now, then in zip(self._moved, before, strict=True))
        if not grown and (self._steps % LOOK_EVERY or self._count_modules() == self._modules):
            return None
        self._modules = self._count_modules()
        names = ModelNames()
        for chunks, wrappers in self._watched:
            names.add(chunks, wrappers)
        if grown:
            self._tell_strangers(names)
        there = {id(m.module) for m in known.modules} | {id(p.parameter) for p in known.parameters}
        now = {id(m.module) for m in names.modules} | {id(p.parameter) for p in names.parameters}
        return names if now - there else None

    def _tell_strangers(self, names: ModelNames) -> None:
        owned = names.by_parameter()
        strangers = sum(p not in owned for optimizer in self._optimizers for p in parameters_of(optimizer))
        if strangers:
            self.guard.warn_once(
                "added parameters",
                f"an optimizer has got {strangers} parameters of modules that are not watched; call watch() with those "
                "modules to have them recorded.",
            )

    def _count_modules(self) -> int:
        return sum(1 for chunks, _ in self._watched for chunk in chunks for _ in chunk.modules())

    def _count_moved(self) -> list[int]:
        return [sum(len(group["params"]) for group in optimizer.param_groups) for optimizer in self._optimizers]
