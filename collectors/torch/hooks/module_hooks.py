"""The forward hooks of modules: run directly on eager modules, traced into the graphs of compiled ones.

A compiler traces the hooks of the modules that it inlines. Hooks of the module whose own call it compiles run outside
its graph, and it is told not to compile them. It guards on every fact of a hook that it reads: up to 2.12, on the
object's identity and on its number in the module. Therefore modules share one hook under one number, and each carries
a tensor that tells it apart: blocks of one class then share their graphs.
"""

import itertools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainsentry.collectors.guard import Guard, InertWhenCopied
from trainsentry.collectors.shared.model_graph import NamedModule
from trainsentry.collectors.torch.hooks.active_modes import is_tracing, run_unseen
from trainsentry.collectors.torch.hooks.compiled_activations import (
    Observer,
    forget_sites,
    named_at,
    new_site,
    trace_begin,
    trace_tensors,
)
from trainsentry.collectors.torch.hooks.compiler import at_work, backend_is_exact, never_compiled

PART = "activations"


_call_uncompiled: Any = run_unseen


def stay_out_of_graphs(modules: Iterable[nn.Module]) -> bool:
    """Make dynamo run hooks outside of graphs, and their modules, uncompiled; return whether this torch can.

    From 2.13 on, dynamo compiles a torch.nn module on its own when it is called between two graphs and has hooks;
    without the monitor's hooks it would run uncompiled. Modules that have hooks of the user's are not touched.
    """
    global _call_uncompiled  # noqa: PLW0603 - dynamo is imported when a model is watched, not before
    if _call_uncompiled is run_unseen:
        _call_uncompiled = torch.compiler.disable(run_unseen)
    built_in = {
        type(m).forward
        for m in modules
        if type(m).__module__.startswith("torch.nn.") and not m._forward_hooks and not m._forward_pre_hooks
    }
    functions = [f for f in built_in if hasattr(f, "__code__")]
    return never_compiled(BeforeForward.__call__, AfterForward.__call__, _ModuleHook._named, named_at, *functions)


def can_be_called(module: nn.Module) -> bool:
    """Return whether a module takes hooks and defines `forward`, unlike for example a ModuleList."""
    return not isinstance(module, torch.jit.ScriptModule) and type(module).forward is not nn.Module.forward


class ForwardListener(Observer, Protocol):
    """Is called by the hooks. `eager` has the names of modules whose hooks have run outside of graphs."""

    guard: Guard
    eager: set[str]

    def enter(self, named: NamedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that a module is entered."""

    def leave(self, named: NamedModule, output: Any) -> None:
        """Note that a module is left."""


class Switch:
    """Settings that the hooks of one monitor read: `sampling` is a plain flag, for which a compiler makes two graphs.

    With `inside_graphs`, hooks also enter graphs whose backend fuses, and may change the last bits of results.
    """

    def __init__(self, *, forward: bool, backward: bool, inside_graphs: bool) -> None:
        self.sampling = False
        self.inside_graphs = inside_graphs
        self.forward = forward
        self.backward = backward


FIRST_KEY: Final = -1_000
"""Key of the hooks of a process's first monitor in a module's hooks; torch's own keys start at 0."""

_MOVED: Final = object()
"""The output of a call without keyword arguments: a tool of torch's, such as the fusing of modules, has put the hook on
another module, where it does nothing."""

_slots: Final = itertools.count()
"""Numbers that tell the hooks of several monitors on the same modules apart."""


class _ModuleHook(InertWhenCopied):
    """The base of both hooks. After `release` a hook stays on its modules and does nothing, until it is reused.

    A module carries the number of its site in `attribute`. `observed` and `outermost` apply to all modules of the hook.
    """

    side: str
    hooks: str
    with_kwargs: str

    def __init__(self, slot: int, switch: Switch, *, observed: bool, outermost: bool) -> None:
        self.owner: ForwardListener | None = None
        self.switch = switch
        self.slot = slot
        self.attribute = f"_trainsentry_site_{slot}"
        self.observed = observed
        self.outermost = outermost
        self.named: dict[nn.Module, NamedModule] = {}
        self._key = FIRST_KEY - slot
        self._registered: set[nn.Module] = set()

    def is_on(self, module: nn.Module) -> bool:
        """Whether a module has this hook now."""
        return vars(module)[self.hooks].get(self._key) is self

    def _named(self, module: nn.Module) -> NamedModule | None:
        """Return a module with its name; a replica of DataParallel is identified by the site number that it carries."""
        return self.named.get(module) or named_at(vars(module).get(self.attribute))

    def attach(self, module: nn.Module) -> None:
        """Register on a module, under the key that is the same on all modules.

        Hooks come and go with each sampled step, so from the second time on they are put where torch has put them.
        """
        members = vars(module)
        if module in self._registered:
            members[self.hooks][self._key], members[self.with_kwargs][self._key] = self, True
            return
        handle = self._register(module)
        for name in (self.hooks, self.with_kwargs):
            members[name][self._key] = members[name].pop(handle.id)
        self._registered.add(module)

    def _register(self, module: nn.Module) -> RemovableHandle:
        raise NotImplementedError

    def remove(self, module: nn.Module) -> None:
        """Unregister from a module."""
        for name in (self.hooks, self.with_kwargs):
            vars(module)[name].pop(self._key, None)

    def release(self) -> None:
        """Give up the owner; the switch, by which graphs are chosen, stays and is off."""
        self.owner = None
        self.named = {}
        self._registered = set()


class BeforeForward(_ModuleHook):
    """Forward pre-hook of observed modules, or of outermost ones, where passes begin."""

    side, hooks, with_kwargs = "input", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"

    __name__ = "before_forward"

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        """Observe the inputs, or add their observation to the graph being traced."""
        if not torch.compiler.is_compiling():
            if kwargs is None or is_tracing():
                return
            named = self._named(module)
            if self.owner is not None and named is not None:
                self.owner.eager.add(named.name)
                run = _call_uncompiled if at_work() else run_unseen
                run(self.owner.guard.run, PART, self.owner.enter, named, args, kwargs)
            return
        if not self.switch.inside_graphs and not backend_is_exact():
            return
        if not self.switch.sampling or not torch.is_grad_enabled():
            return
        site = getattr(module, self.attribute)
        if self.outermost:
            trace_begin(site)
        if not self.observed:
            return
        _trace(self, args, site)
        _trace(self, kwargs, site)

    def _register(self, module: nn.Module) -> RemovableHandle:
        return module.register_forward_pre_hook(self, with_kwargs=True)


class AfterForward(_ModuleHook):
    """Forward hook of observed modules, or of outermost ones."""

    side, hooks, with_kwargs = "output", "_forward_hooks", "_forward_hooks_with_kwargs"

    __name__ = "after_forward"

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = _MOVED) -> None:
        """Observe the outputs, or add their observation to the graph being traced."""
        if not torch.compiler.is_compiling():
            if output is _MOVED or is_tracing():
                return
            named = self._named(module)
            if self.owner is not None and named is not None:
                run = _call_uncompiled if at_work() else run_unseen
                run(self.owner.guard.run, PART, self.owner.leave, named, output)
            return
        if not self.switch.inside_graphs and not backend_is_exact():
            return
        if not self.observed or not self.switch.sampling or not torch.is_grad_enabled():
            return
        _trace(self, output, getattr(module, self.attribute))

    def _register(self, module: nn.Module) -> RemovableHandle:
        return module.register_forward_hook(self, with_kwargs=True)


class ModuleHooks:
    """The hooks of one monitor: one pair per kind of module (outermost or not, observed or not).

    Hooks that a closed monitor has left on the same modules are reused.
    """

    def __init__(
        self, owner: ForwardListener, switch: Switch, modules: Sequence[NamedModule], observed: Collection[str]
    ) -> None:
        self.modules = modules
        left = _released_hooks(modules)
        self.switch = left[0].switch if left else switch
        vars(self.switch).update(vars(switch))
        slot = left[0].slot if left else next(_slots)
        self._pairs: dict[tuple[bool, bool], tuple[BeforeForward, AfterForward]] = {}
        own: weakref.ref[Observer] = weakref.ref(owner)
        for named in _distinct(modules):
            pair = self._pair(not named.name, named.name in observed, slot, left)
            _carry_site(named, own, pair[0])
            for hook in pair:
                hook.owner = owner
                hook.named[named.module] = named

    def _pair(
        self, outermost: bool, observed: bool, slot: int, left: list[_ModuleHook]
    ) -> tuple[BeforeForward, AfterForward]:
        kind = (outermost, observed)
        if kind not in self._pairs:
            same = [hook for hook in left if (hook.outermost, hook.observed) == kind]
            before = next((hook for hook in same if isinstance(hook, BeforeForward)), None)
            after = next((hook for hook in same if isinstance(hook, AfterForward)), None)
            self._pairs[kind] = (
                before or BeforeForward(slot, self.switch, observed=observed, outermost=outermost),
                after or AfterForward(slot, self.switch, observed=observed, outermost=outermost),
            )
        return self._pairs[kind]

    def attach(self) -> None:
        """Register the hooks on every module that lacks them."""
        for pair in self._pairs.values():
            for module in pair[0].named:
                for hook in pair:
                    if not hook.is_on(module):
                        hook.attach(module)

    def detach(self, stays: Callable[[NamedModule], bool]) -> None:
        """Unregister the hooks, except on modules for which `stays` returns True."""
        for pair in self._pairs.values():
            for module, named in pair[0].named.items():
                on = [hook for hook in pair if hook.is_on(module)]
                if on and not stays(named):
                    for hook in on:
                        hook.remove(module)

    def release(self) -> None:
        """Make the remaining hooks do nothing."""
        for before, after in self._pairs.values():
            forget_sites(int(vars(m)[before.attribute]) for m in before.named if before.attribute in vars(m))
            for module in before.named:
                if not before.is_on(module):
                    vars(module).pop(before.attribute, None)
            before.release()
            after.release()

    @property
    def attached(self) -> int:
        """Number of modules that carry hooks."""
        return sum(before.is_on(module) for before, _ in self._pairs.values() for module in before.named)


def _distinct(modules: Sequence[NamedModule]) -> Iterator[NamedModule]:
    """Yield each module once, by its first name: a chunk may also be inside another chunk."""
    seen: set[nn.Module] = set()
    for named in modules:
        if named.module not in seen:
            seen.add(named.module)
            yield named


def _carry_site(named: NamedModule, owner: "weakref.ref[Observer]", hook: _ModuleHook) -> None:
    """Set a module's site number; a module whose hook has stayed keeps its number, on which graphs depend.

    A copied module carries the original's number but not its hook, so it gets a new number.
    """
    members = vars(named.module)
    known = members.get(hook.attribute) if hook.is_on(named.module) else None
    members[hook.attribute] = new_site(owner, named, known)


def _hooks_on(modules: Sequence[NamedModule]) -> Iterator[_ModuleHook]:
    for named in modules:
        module = named.module
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            if isinstance(hook, _ModuleHook):
                yield hook


def _released_hooks(modules: Sequence[NamedModule]) -> list[_ModuleHook]:
    """Return the hooks of one closed monitor that are still on some modules."""
    left = list(dict.fromkeys(hook for hook in _hooks_on(modules) if hook.owner is None))
    return [hook for hook in left if hook.slot == left[0].slot]


def _trace(hook: _ModuleHook, value: Any, site: Tensor) -> None:
    trace_tensors(value, site, hook.side, forward=hook.switch.forward, backward=hook.switch.backward)
