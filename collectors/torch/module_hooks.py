"""The two hooks of a module: run as they are on an eager module, traced into the graph of a compiled one.

A compiler traces the hooks of the modules that it inlines. Those of the module whose own call it compiles run outside
its graph, and it is told to leave them alone. What it sees of a hook is `switch`, `site` and two flags, nothing else:
each of them is part of what it checks before it runs a graph.
"""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainsentry.collectors.guard import Guard
from trainsentry.collectors.inert_hook import InertWhenCopied
from trainsentry.collectors.named_module import NamedModule
from trainsentry.collectors.torch.compiled_activations import (
    Observer,
    forget_sites,
    new_site,
    trace_begin,
    trace_tensors,
)
from trainsentry.collectors.torch.compiler import at_work, backend_is_exact, never_compiled

PART = "activations"


def _called(function: Callable[..., Any], *args: Any) -> None:
    function(*args)


_left_alone: Any = _called


def stay_out_of_graphs(modules: Iterable[nn.Module]) -> bool:
    """Have dynamo run hooks outside of graphs, and what they hang on, as they are; return whether this torch can.

    From 2.13 on dynamo compiles a module of torch.nn by itself, where it is called between two graphs, for no other
    reason than that it has hooks; without ours it would run as it is. (With hooks of the user's it is left alone.)
    """
    global _left_alone  # noqa: PLW0603 - dynamo is imported when a model is watched, not before
    if _left_alone is _called:
        _left_alone = torch.compiler.disable(_called)
    built_in = {
        type(m).forward
        for m in modules
        if type(m).__module__.startswith("torch.nn.") and not m._forward_hooks and not m._forward_pre_hooks
    }
    functions = [f for f in built_in if hasattr(f, "__code__")]
    return never_compiled(BeforeForward.__call__, AfterForward.__call__, *functions)


class Owner(Observer, Protocol):
    """Whom the hooks report to."""

    guard: Guard

    def enter(self, named: NamedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take note of a module that is entered."""

    def leave(self, named: NamedModule, output: Any) -> None:
        """Take note of a module that is left."""


class Switch:
    """What the hooks of one monitor do now: `sampling` is the plain flag that a compiler makes two graphs of.

    With `inside_graphs` they also become part of graphs whose backend fuses, and may change the last bits of results.
    """

    def __init__(self, *, forward: bool, backward: bool, inside_graphs: bool) -> None:
        self.sampling = False
        self.inside_graphs = inside_graphs
        self.forward = forward
        self.backward = backward


class _ModuleHook(InertWhenCopied):
    """What both hooks are: one that is `released` stays on its module and does nothing, until it is `taken` again."""

    side: str

    def __init__(self, owner: Owner, switch: Switch, named: NamedModule, *, observed: bool) -> None:
        self.handle: RemovableHandle | None = None
        self.site = new_site(owner, named, self.side)
        self._belong(owner, switch, named, observed)

    def take(self, owner: Owner, switch: Switch, named: NamedModule, *, observed: bool) -> None:
        """Work for another monitor than the one that has released it: graphs that hold this hook stay valid."""
        new_site(owner, named, self.side, self.site)
        self._belong(owner, switch, named, observed)

    def _belong(self, owner: Owner, switch: Switch, named: NamedModule, observed: bool) -> None:
        self.owner: Owner | None = owner
        self.switch = switch
        self.named = named
        self.observed = observed
        self.outermost = not named.name

    def release(self) -> None:
        """Belong to nobody; the switch stays, as graphs are chosen by it, and is off."""
        self.owner = None
        forget_sites([int(self.site)])

    def remove(self) -> None:
        """Leave the module."""
        if self.handle is not None:
            self.handle.remove()
            self.handle = None


class BeforeForward(_ModuleHook):
    """Forward pre-hook of an observed module, or of an outermost one, where passes begin."""

    side = "input"

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Observe the inputs, or put that into the graph that is being traced."""
        if not torch.compiler.is_compiling():
            if self.owner is not None:
                run = _left_alone if at_work() else _called
                run(self.owner.guard.run, PART, self.owner.enter, self.named, args, kwargs)
            return
        if not self.switch.inside_graphs and not backend_is_exact():
            return
        if not self.switch.sampling or not torch.is_grad_enabled():
            return
        if self.outermost:
            trace_begin(self.site)
        if not self.observed:
            return
        _trace(self.switch, args, self.site)
        _trace(self.switch, kwargs, self.site)

    def attach(self, module: nn.Module) -> None:
        """Go onto a module."""
        self.handle = module.register_forward_pre_hook(self, with_kwargs=True)


class AfterForward(_ModuleHook):
    """Forward hook of an observed module, or of an outermost one."""

    side = "output"

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Observe the outputs, or put that into the graph that is being traced."""
        if not torch.compiler.is_compiling():
            if self.owner is not None:
                run = _left_alone if at_work() else _called
                run(self.owner.guard.run, PART, self.owner.leave, self.named, output)
            return
        if not self.switch.inside_graphs and not backend_is_exact():
            return
        if not self.observed or not self.switch.sampling or not torch.is_grad_enabled():
            return
        _trace(self.switch, output, self.site)

    def attach(self, module: nn.Module) -> None:
        """Go onto a module."""
        self.handle = module.register_forward_hook(self, with_kwargs=True)


def hooks_for(
    owner: Owner, switch: Switch, named: NamedModule, *, observed: bool
) -> tuple[BeforeForward, AfterForward]:
    """Return the hooks of a module: those that a closed monitor has left on it, or new ones."""
    module = named.module
    before = _left_on(module._forward_pre_hooks.values(), BeforeForward)
    after = _left_on(module._forward_hooks.values(), AfterForward)
    if before is None or after is None:
        return (
            BeforeForward(owner, switch, named, observed=observed),
            AfterForward(owner, switch, named, observed=observed),
        )
    before.take(owner, switch, named, observed=observed)
    after.take(owner, switch, named, observed=observed)
    return before, after


def _left_on(hooks: Any, kind: type[_ModuleHook]) -> Any:
    return next((hook for hook in hooks if isinstance(hook, kind) and hook.owner is None), None)


def _trace(switch: Switch, value: Any, site: Tensor) -> None:
    trace_tensors(value, site, forward=switch.forward, backward=switch.backward)
