"""The two hooks of modules: run as they are on eager modules, traced into the graphs of compiled ones.

A compiler traces the hooks of the modules that it inlines. Those of the module whose own call it compiles run outside
its graph, and it is told to leave them alone. Whatever it sees of a hook it checks before it runs a graph, up to 2.12
which object it is and under which number the module holds it. So modules share one hook under one number, and what
differs between them is a tensor that each carries: blocks of one class then share their graphs.
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
    return never_compiled(BeforeForward.__call__, AfterForward.__call__, _ModuleHook._named, named_at, *functions)


class ForwardListener(Observer, Protocol):
    """Whom the hooks report to. `eager` has the names of modules whose hooks have run outside of graphs."""

    guard: Guard
    eager: set[str]

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


FIRST_KEY: Final = -1_000
"""Number under which modules hold the hooks of a process's first monitor; torch counts its own from 0 up."""

_places: Final = itertools.count()
"""What tells the hooks of one monitor from another's on the same modules, also while neither has any there."""


class _ModuleHook(InertWhenCopied):
    """What both hooks are: one that is `released` stays on its modules and does nothing, until it is taken again.

    `attribute` is where a module carries the number of its site. `observed` and `outermost` hold for all its modules.
    """

    side: str
    hooks: str
    with_kwargs: str

    def __init__(self, place: int, switch: Switch, *, observed: bool, outermost: bool) -> None:
        self.owner: ForwardListener | None = None
        self.switch = switch
        self.place = place
        self.attribute = f"_trainsentry_site_{place}"
        self.observed = observed
        self.outermost = outermost
        self.named: dict[nn.Module, NamedModule] = {}
        self._key = FIRST_KEY - place

    def is_on(self, module: nn.Module) -> bool:
        """Whether a module has this hook now."""
        return vars(module)[self.hooks].get(self._key) is self

    def _named(self, module: nn.Module) -> NamedModule | None:
        """Return what a module is called; a replica of DataParallel's is known by the number that it carries."""
        return self.named.get(module) or named_at(vars(module).get(self.attribute))

    def attach(self, module: nn.Module) -> None:
        """Go onto a module, under the number that is the same on all of them."""
        handle = self._register(module)
        for name in (self.hooks, self.with_kwargs):
            held = vars(module)[name]
            held[self._key] = held.pop(handle.id)

    def _register(self, module: nn.Module) -> RemovableHandle:
        raise NotImplementedError

    def remove(self, module: nn.Module) -> None:
        """Leave a module."""
        for name in (self.hooks, self.with_kwargs):
            vars(module)[name].pop(self._key, None)

    def release(self) -> None:
        """Belong to nobody; the switch stays, as graphs are chosen by it, and is off."""
        self.owner = None
        self.named = {}


class BeforeForward(_ModuleHook):
    """Forward pre-hook of observed modules, or of outermost ones, where passes begin."""

    side, hooks, with_kwargs = "input", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Observe the inputs, or put that into the graph that is being traced."""
        if not torch.compiler.is_compiling():
            named = self._named(module)
            if self.owner is not None and named is not None:
                self.owner.eager.add(named.name)
                run = _left_alone if at_work() else _called
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

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Observe the outputs, or put that into the graph that is being traced."""
        if not torch.compiler.is_compiling():
            named = self._named(module)
            if self.owner is not None and named is not None:
                run = _left_alone if at_work() else _called
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
    """The hooks of one monitor: a pair for the outermost modules, one for those inside.

    Those that a closed monitor has left on the same modules are used again.
    """

    def __init__(
        self, owner: ForwardListener, switch: Switch, modules: Sequence[NamedModule], observed: Collection[str]
    ) -> None:
        self.modules = modules
        left = _left_on(modules)
        self.switch = left[0].switch if left else switch
        vars(self.switch).update(vars(switch))
        place = left[0].place if left else next(_places)
        self._pairs: dict[tuple[bool, bool], tuple[BeforeForward, AfterForward]] = {}
        own: weakref.ref[Observer] = weakref.ref(owner)
        for named in _once(modules):
            pair = self._pair(not named.name, named.name in observed, place, left)
            _carry_site(named, own, pair[0])
            for hook in pair:
                hook.owner = owner
                hook.named[named.module] = named

    def _pair(
        self, outermost: bool, observed: bool, place: int, left: list[_ModuleHook]
    ) -> tuple[BeforeForward, AfterForward]:
        kind = (outermost, observed)
        if kind not in self._pairs:
            same = [hook for hook in left if (hook.outermost, hook.observed) == kind]
            before = next((hook for hook in same if isinstance(hook, BeforeForward)), None)
            after = next((hook for hook in same if isinstance(hook, AfterForward)), None)
            self._pairs[kind] = (
                before or BeforeForward(place, self.switch, observed=observed, outermost=outermost),
                after or AfterForward(place, self.switch, observed=observed, outermost=outermost),
            )
        return self._pairs[kind]

    def attach(self) -> None:
        """Put the hooks on every module that has none."""
        for pair in self._pairs.values():
            for module in pair[0].named:
                for hook in pair:
                    if not hook.is_on(module):
                        hook.attach(module)

    def detach(self, stays: Callable[[NamedModule], bool]) -> None:
        """Take the hooks off, but for modules that `stays` names."""
        for pair in self._pairs.values():
            for module, named in pair[0].named.items():
                for hook in pair:
                    if hook.is_on(module) and not stays(named):
                        hook.remove(module)

    def release(self) -> None:
        """Have the hooks that are left do nothing."""
        for before, after in self._pairs.values():
            forget_sites(int(vars(m)[before.attribute]) for m in before.named if before.attribute in vars(m))
            for module in before.named:
                if not before.is_on(module):
                    vars(module).pop(before.attribute, None)
            before.release()
            after.release()

    @property
    def attached(self) -> int:
        """How many modules carry hooks."""
        return sum(before.is_on(module) for before, _ in self._pairs.values() for module in before.named)


def _once(modules: Sequence[NamedModule]) -> Iterator[NamedModule]:
    """Yield each module once: one that is a chunk and also inside another is taken by its first name."""
    seen: set[nn.Module] = set()
    for named in modules:
        if named.module not in seen:
            seen.add(named.module)
            yield named


def _carry_site(named: NamedModule, owner: "weakref.ref[Observer]", hook: _ModuleHook) -> None:
    """Have a module carry the number of a site; one whose hook has stayed keeps its number, as graphs do.

    A copy of a module carries the original's, which is none of its own.
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


def _left_on(modules: Sequence[NamedModule]) -> list[_ModuleHook]:
    """Return the hooks of one closed monitor that are still on some modules."""
    left = list(dict.fromkeys(hook for hook in _hooks_on(modules) if hook.owner is None))
    return [hook for hook in left if hook.place == left[0].place]


def _trace(hook: _ModuleHook, value: Any, site: Tensor) -> None:
    trace_tensors(value, site, hook.side, forward=hook.switch.forward, backward=hook.switch.backward)
