"""Finds the models and optimizers of a script that did not hand them over, when an optimizer first steps."""

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from trainsentry.collectors.torch.hooks.any_step import before_any_step
from trainsentry.collectors.torch.parameters.readers import parameters_of
from trainsentry.collectors.torch.sharding.registry import is_data_parallel


@dataclass(frozen=True)
class FoundModel:
    """A model that holds parameters of an optimizer, under the name of the variable or attribute that it sits in."""

    name: str
    module: nn.Module
    parameters: int


@dataclass(frozen=True)
class Discovery:
    """The models that a training moves, and their optimizers; none for models whose engine brings its own."""

    models: tuple[FoundModel, ...]
    optimizers: tuple[Optimizer, ...]

    @property
    def watched(self) -> tuple[Any, Any]:
        """The arguments of `watch`: several models get their names as prefixes, unless a wrapper holds one."""
        modules = [found.module for found in self.models]
        optimizers = list(self.optimizers) or None
        if len(modules) == 1:
            return modules[0], optimizers
        if any(map(is_data_parallel, modules)):
            return modules, optimizers
        return nn.ModuleDict({found.name: found.module for found in self.models}), optimizers


def before_each_step(callback: Callable[[Optimizer], None]) -> Callable[[], None]:
    """Call `callback(optimizer)` before any torch optimizer of this process steps; return a function that ends that."""
    return before_any_step(callback).remove


def discover(stepping: Optimizer, known: Sequence[nn.Module] = ()) -> Discovery:
    """Return the models and optimizers that live now, beside those in `known`; `stepping` is one of the optimizers.

    A model is the outermost module that holds parameters of an optimizer. Where no module holds any (an engine gives
    its optimizer flat parameters), the models are the outermost modules that can be trained.
    """
    modules, optimizers = _living()
    inside = {id(child) for module in modules for child in module._modules.values() if child is not None}
    watched = {id(parameter) for module in known for parameter in module.parameters()}
    roots = [m for m in modules if id(m) not in inside]
    moved = {id(p) for optimizer in optimizers for p in parameters_of(optimizer)} - watched
    chosen = list(_holders(roots, moved))
    owned = {id(p) for module, _ in chosen for p in module.parameters()}
    own = tuple(o for o in optimizers if any(id(p) in owned for p in parameters_of(o)))
    if stepping not in own:
        mine = {id(p) for p in parameters_of(stepping)}
        if not mine & watched:
            others = [(m, n) for m in roots if (n := _trainable(m, watched | owned))]
            largest = max(others, key=lambda pair: pair[1], default=None)
            return Discovery(_named([largest] if largest is not None else []), ())
    return Discovery(_named(chosen), own)


def _living() -> tuple[list[nn.Module], list[Optimizer]]:
    """Return the live modules and optimizers, without optimizers that only wrap another one."""
    modules: list[nn.Module] = []
    optimizers: list[Optimizer] = []
    for thing in gc.get_objects():
        kind = type(thing)  # an object may lie about its class, and a proxy may load what it stands for
        if issubclass(kind, nn.Module) and "_modules" in thing.__dict__:
            modules.append(thing)
        elif issubclass(kind, Optimizer) and "param_groups" in thing.__dict__:
            optimizers.append(thing)
    inner = {id(o) for o in optimizers}
    return modules, [o for o in optimizers if id(vars(o).get("optimizer")) not in inner]


def _holders(roots: Sequence[nn.Module], moved: set[int]) -> Iterator[tuple[nn.Module, int]]:
    """Yield the modules that hold moved parameters, each parameter once: a data-parallel wrapper before others."""
    left = set(moved)
    ordered = sorted(roots, key=lambda m: (not is_data_parallel(m), sum(1 for _ in m.modules())))
    for module in ordered:
        held = [p for p in module.parameters() if id(p) in left]
        if held:
            left -= {id(p) for p in held}
            yield module, sum(p.numel() for p in held)


def _trainable(module: nn.Module, taken: set[int]) -> int:
    return sum(p.numel() or 1 for p in module.parameters() if p.requires_grad and id(p) not in taken)


def _named(found: Sequence[tuple[nn.Module, int]]) -> tuple[FoundModel, ...]:
    """Return the modules with the names of the variables they sit in; equal names are numbered."""
    models: list[FoundModel] = []
    for module, parameters in found:
        name = _variable_of(module) or type(module).__name__
        taken = sum(other.name.partition("#")[0] == name for other in models)
        models.append(FoundModel(f"{name}#{taken}" if taken else name, module, parameters))
    return tuple(models)


def _variable_of(module: nn.Module) -> str | None:
    """Return the name under which the script, or a function that runs now, holds a module."""
    spaces: list[dict[str, Any]] = [vars(sys.modules["__main__"])]
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        spaces.append(dict(frame.f_locals))
        owner = frame.f_locals.get("self")
        spaces.append(getattr(owner, "__dict__", None) or {})
        frame = frame.f_back
    ours = __name__.partition(".")[0]
    for space in spaces:
        if str(space.get("__name__", "")).startswith(ours):
            continue
        for name, value in list(space.items()):
            if value is module and name.isidentifier() and name not in _OUR_VARIABLES:
                return name
    return None


_OUR_VARIABLES = frozenset({"module", "thing", "value", "m"})
"""Variables of this file, which hold modules while it searches."""
