"""Registers the wrappers that libraries put around optimizers, and finds the optimizers inside them.

A wrapper is known by its class and package, so that no library is imported.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer


@dataclass(frozen=True)
class OptimizerWrapper:
    """A class `kind` of the package `library`, or a subclass of it, that keeps its optimizers in `attribute`.

    The attribute holds one optimizer or a list of them; each may be wrapped again. With `replaces_step` the wrapper
    does the work of an inner wrapper's `step` without calling it, so that the step of the whole is the wrapper's.
    """

    library: str
    kind: str
    attribute: str
    replaces_step: bool = False

    def wraps(self, optimizer: Any) -> bool:
        """Whether an optimizer is of this kind."""
        return any(c.__name__ == self.kind and _package_of(c) == self.library for c in type(optimizer).__mro__)


@dataclass(frozen=True)
class FoundOptimizer:
    """An optimizer that no known wrapper surrounds, and the object whose `step` is its step, usually itself."""

    optimizer: Any
    stepped_by: Any


_wrappers: list[OptimizerWrapper] = [
    OptimizerWrapper("accelerate", "AcceleratedOptimizer", "optimizer"),  # its DeepSpeed wrapper is a subclass
    OptimizerWrapper("lightning", "LightningOptimizer", "_optimizer"),
    OptimizerWrapper("lightning", "_FabricOptimizer", "_optimizer"),
    OptimizerWrapper("pytorch_lightning", "LightningOptimizer", "_optimizer"),
    OptimizerWrapper("lightning_fabric", "_FabricOptimizer", "_optimizer"),
    OptimizerWrapper("megatron", "ChainedOptimizer", "chained_optimizers", replaces_step=True),
    OptimizerWrapper("schedulefree", "ScheduleFreeWrapper", "base"),
    OptimizerWrapper("schedulefree", "ScheduleFreeWrapperReference", "base"),
    OptimizerWrapper("torch", "PostLocalSGDOptimizer", "optim"),
    OptimizerWrapper("torch", "_NamedOptimizer", "_optimizer"),
    OptimizerWrapper("torchtitan", "OptimizersContainer", "optimizers"),
    OptimizerWrapper("apex", "FP16_Optimizer", "optimizer"),
]


def register_wrapper(wrapper: OptimizerWrapper) -> None:
    """Add a kind of wrapper before all others; call it before `watch`."""
    _wrappers.insert(0, wrapper)


def unregister_wrapper(wrapper: OptimizerWrapper) -> None:
    """Undo `register_wrapper`."""
    _wrappers.remove(wrapper)


def unwrapped(optimizers: Sequence[Any]) -> list[FoundOptimizer]:
    """Return the optimizers inside the known wrappers among `optimizers`, once each, in order."""
    found = {id(each.optimizer): each for given in optimizers for each in _inside(given, None)}
    return list(found.values())


def _inside(optimizer: Any, stepped_by: Any) -> Iterator[FoundOptimizer]:
    if _takes_two_passes(optimizer):
        yield from _inside(optimizer.base_optimizer, stepped_by)
        return
    wrapper = next((known for known in _wrappers if known.wraps(optimizer)), None)
    held = None if wrapper is None else getattr(optimizer, wrapper.attribute, None)
    if wrapper is None or held is None:
        yield FoundOptimizer(optimizer, stepped_by if stepped_by is not None else optimizer)
        return
    if stepped_by is None and wrapper.replaces_step:
        stepped_by = optimizer
    for each in held if isinstance(held, (list, tuple)) else [held]:
        yield from _inside(each, stepped_by)


def _takes_two_passes(optimizer: Any) -> bool:
    """Whether an optimizer is one of those around a base that many projects copy, with a step for each of two passes.

    Their own `step` is not called (Foret et al., "Sharpness-aware minimization", 2021): the second one calls that of
    the base, which has the same groups.
    """
    has_steps = all(callable(getattr(optimizer, name, None)) for name in ("first_step", "second_step"))
    return has_steps and is_plain(getattr(optimizer, "base_optimizer", None))


def is_plain(optimizer: Any) -> bool:
    """Whether an object is a torch optimizer with hooks of its own, not a wrapper that only looks like one."""
    return isinstance(optimizer, Optimizer) and "_optimizer_step_pre_hooks" in vars(optimizer)


def advice(optimizer: Any) -> str:
    """Return what to pass to `watch` in place of an object that is no known optimizer, for an error message."""
    allowed = "torch.optim.Optimizer, a known wrapper around one, or a list of them"
    if isinstance(optimizer, Optimizer) and not is_plain(optimizer):
        allowed += "; this one has no hooks, as its __init__ did not call that of torch.optim.Optimizer"
    held = [f"{name} ({type(value).__name__})" for name, value in _attributes(optimizer) if is_plain(value)]
    if not held:
        return f"{allowed}; without one, call watch(model), and the monitor's step() after each update"
    return f"{allowed}; pass the optimizer in its attribute {held[0]}"


def _attributes(optimizer: Any) -> list[tuple[str, Any]]:
    return list(vars(optimizer).items()) if hasattr(optimizer, "__dict__") else []


def _package_of(kind: type) -> str:
    return kind.__module__.partition(".")[0]
