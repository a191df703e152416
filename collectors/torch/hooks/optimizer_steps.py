"""Hooks the begin and end of each optimizer's step, and the steps that a GradScaler skips."""

import functools
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from trainsentry.collectors.backend import StepListener
from trainsentry.collectors.guard import InertWhenCopied
from trainsentry.collectors.torch.device.registry import stream_is_captured
from trainsentry.collectors.torch.hooks.any_step import AnyStepHandle, is_inside_own_step, is_of_checkpoint
from trainsentry.collectors.torch.hooks.optimizer_arrivals import Arrivals
from trainsentry.collectors.torch.sharding.sharding import OuterOptimizer


class OptimizerSteps:
    """Reports the begin and end of each optimizer's step to a listener, until `close`.

    `outer` maps the id of an optimizer to the wrapper that steps it: once for each parameter group, or never when it
    finds an overflow, so that only the wrapper's step is a whole step. Wrappers have no hooks, so the instance's `step`
    is wrapped; `before_outer()` runs first. A `step` that calls its base class's is one step. One that a device only
    captures into a graph (`is_captured`) does not count, nor one that makes state for a checkpoint. `arrivals` takes
    note of optimizers that were not given.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        listener: StepListener,
        outer: Mapping[int, OuterOptimizer] | None = None,
        is_captured: Callable[[Optimizer], bool] = lambda _: stream_is_captured(),
        before_outer: Callable[[], object] = lambda: None,
        arrivals: Arrivals | None = None,
    ) -> None:
        self.optimizers = list(optimizers)
        self.is_captured = is_captured
        self.captured = False
        self.listener = listener
        self.outer = dict(outer or {})
        self._arrivals = arrivals
        self.before_outer = before_outer
        self.under_way: set[int] = set()
        self.nested: set[int] = set()
        self.apart: set[int] = set()  # those that take a step that is none of the training
        self.has_stepped = False
        self.adopted = 0
        self.parts: Counter[int] = Counter()
        self.gradients: dict[int, Tensor] = {}
        self.stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.in_scaler: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._handles: list[RemovableHandle | AnyStepHandle] = []
        self._own_steps: dict[int, tuple[Any, Any]] = {}
        try:
            for optimizer in optimizers:
                self._hook(optimizer)
            for stepper in {id(each.stepped_by): each.stepped_by for each in self.outer.values()}.values():
                self._own_steps[id(stepper)] = stepper, vars(stepper).get("step")
                stepper.step = _watched_outer(self, stepper, stepper.step)
            if arrivals is not None:
                self._handles.append(arrivals.listen(self))
        except BaseException:
            self.close()  # an optimizer that takes no hook leaves none on the others
            raise

    def _hook(self, optimizer: Optimizer) -> None:
        self._handles.append(optimizer.register_step_pre_hook(_Before(self)))
        self._handles.append(optimizer.register_step_post_hook(_After(self)))

    def adopt(self, optimizer: Optimizer) -> None:
        """Watch an optimizer that was not given, from the step on that it is about to take."""
        self.optimizers.append(optimizer)
        self.adopted += 1
        self._hook(optimizer)

    def close(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for stepper, own in self._own_steps.values():
            vars(stepper).pop("step", None)
            if own is not None:
                stepper.step = own
        self._own_steps.clear()
        self.outer.clear()
        unwatch_scalers(self)

    @property
    def adopted_only(self) -> bool:
        """Whether optimizers are watched, and none of them was given."""
        return 0 < len(self.optimizers) == self.adopted

    def ended_step(self) -> bool:
        """Whether the optimizers' own calls end the training step: there are some, and no graph has captured them."""
        return bool(self.optimizers) and not self.captured

    def owns(self, optimizer: Any) -> bool:
        """Whether `optimizer` is watched."""
        # `map`: a generator that is dropped half-way could swallow a Ctrl-C.
        return any(map(functools.partial(operator.is_, optimizer), self.optimizers))


@dataclass(frozen=True, slots=True)
class _Before(InertWhenCopied):
    owner: OptimizerSteps

    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _before(self.owner, optimizer, args, kwargs)


@dataclass(frozen=True, slots=True)
class _After(InertWhenCopied):
    owner: OptimizerSteps

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        _after(self.owner, optimizer)


# A compiled `optimizer.step` breaks its graph here instead of tracing the monitor.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _before(owner: OptimizerSteps, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if owner.is_captured(optimizer):
        owner.captured = True
        return
    if id(optimizer) in owner.under_way and is_inside_own_step(optimizer):
        owner.nested.add(id(optimizer))
        return
    if id(optimizer) in owner.apart and is_inside_own_step(optimizer):
        return
    if is_of_checkpoint(optimizer):
        owner.apart.add(id(optimizer))
        return
    owner.apart.discard(id(optimizer))  # such a step may have failed
    owner.stepped.add(optimizer)
    owner.has_stepped = True
    owner.under_way.add(id(optimizer))
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args begin with the optimizer
    owner.parts[id(optimizer)] += 1
    owner.listener.before_optimizer(optimizer, has_closure=callable(closure))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _after(owner: OptimizerSteps, optimizer: Optimizer) -> None:
    if id(optimizer) in owner.nested and is_inside_own_step(optimizer):
        return
    if id(optimizer) in owner.apart:
        if not is_inside_own_step(optimizer):
            owner.apart.discard(id(optimizer))
        return
    owner.under_way.discard(id(optimizer))
    owner.nested.discard(id(optimizer))
    if owner.is_captured(optimizer):
        return
    if id(optimizer) in owner.outer:
        owner.listener.after_part(optimizer)
    else:
        owner.listener.after_optimizer(optimizer)


def _watched_outer(owner: OptimizerSteps, stepper: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the `step` of a wrapper, which reports the steps of all optimizers inside it."""
    inside = [each for each in owner.outer.values() if each.stepped_by is stepper]

    @functools.wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        if any(owner.is_captured(outer.inner) for outer in inside):
            return original(*args, **kwargs)
        owner.before_outer()
        owner.gradients = {}
        for outer in inside:
            owner.parts[id(outer.inner)] = 0
            owner.gradients |= outer.reduced_gradients()
        try:
            result = original(*args, **kwargs)
            for outer in inside:
                _report(owner, outer)
        finally:
            owner.gradients = {}
        return result

    return step


def _report(owner: OptimizerSteps, outer: OuterOptimizer) -> None:
    """Report whether the step of a wrapper has updated an optimizer's parameters."""
    if owner.parts[id(outer.inner)]:
        owner.listener.after_optimizer(outer.inner)
    elif outer.adapts_loss_scale:
        owner.listener.scaler_skipped(outer.optimizer, outer.inner)
    else:
        owner.listener.update_refused(outer.inner)


_scaler_watchers: "list[weakref.ref[OptimizerSteps]]" = []
_patched: dict[type, Callable[..., Any]] = {}


def watch_scalers(steps: OptimizerSteps, grad_scaler: Any = None) -> None:
    """Report the steps that a GradScaler skips to the listener of `steps`.

    A skipping scaler calls no hook, so `GradScaler.step` is patched on its class while an `OptimizerSteps` watches; an
    attribute of the instance would make the scaler impossible to pickle.
    """
    _scaler_watchers.append(weakref.ref(steps))
    for cls in {torch.amp.GradScaler, *([_definer(grad_scaler)] if grad_scaler is not None else [])}:
        if cls not in _patched:
            _patched[cls] = cls.__dict__["step"]
            cls.step = _watched_step(_patched[cls])  # type: ignore[attr-defined]


def unwatch_scalers(steps: OptimizerSteps) -> None:
    """Undo `watch_scalers`; after the last watcher, restore the class's own `step`."""
    _scaler_watchers[:] = [ref for ref in _scaler_watchers if ref() is not None and ref() is not steps]
    if not _scaler_watchers:
        for cls, original in _patched.items():
            cls.step = original  # type: ignore[attr-defined]
        _patched.clear()


def _definer(grad_scaler: Any) -> type:
    return next(cls for cls in type(grad_scaler).__mro__ if "step" in cls.__dict__)


def _watched_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(self: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        # A subclass that calls its parent's step is reported once.
        alive = [w for ref in _scaler_watchers if (w := ref()) is not None]
        watchers = [w for w in alive if w.owns(optimizer) and optimizer not in w.in_scaler]
        watchers = [w for w in watchers if not w.is_captured(optimizer)]
        for watcher in watchers:
            watcher.stepped.discard(optimizer)
            watcher.in_scaler.add(optimizer)
            watcher.listener.scaler_entered(self, optimizer)
        try:
            result = original(self, optimizer, *args, **kwargs)
        finally:
            for watcher in watchers:
                watcher.in_scaler.discard(optimizer)
        for watcher in watchers:
            if optimizer not in watcher.stepped:
                watcher.listener.scaler_skipped(self, optimizer)
        return result

    return step
