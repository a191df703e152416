"""The two hooks of a module: run as they are on an eager module, traced into the graph of a compiled one."""

from typing import Any, Protocol

import torch

from trainsentry.collectors.guard import Guard
from trainsentry.collectors.inert_hook import InertWhenCopied
from trainsentry.collectors.named_module import NamedModule
from trainsentry.collectors.torch.compiled_activations import (
    GRADIENTS_TRACED,
    Observer,
    new_site,
    trace_begin,
    trace_noted,
    trace_tensors,
)

PART = "activations"


class Owner(Observer, Protocol):
    """Whom the hooks report to. `sampling` is the plain flag that a compiler makes two graphs of."""

    guard: Guard
    sampling: bool
    forward: bool
    backward: bool

    def enter(self, named: NamedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take note of a module that is entered."""

    def leave(self, named: NamedModule, output: Any) -> None:
        """Take note of a module that is left."""


class BeforeForward(InertWhenCopied):
    """Forward pre-hook of an observed module, or of an outermost one, where passes begin."""

    __slots__ = ("named", "observed", "outermost", "owner", "site")

    def __init__(self, owner: Owner, named: NamedModule, *, observed: bool) -> None:
        self.owner = owner
        self.named = named
        self.observed = observed
        self.outermost = not named.name
        self.site = new_site(owner, named, "input")

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Observe the inputs, or put that into the graph that is being traced."""
        if not torch.compiler.is_compiling():
            self.owner.guard.run(PART, self.owner.enter, self.named, args, kwargs)
            return
        trace_noted(self.site)
        if not self.owner.sampling or not torch.is_grad_enabled():
            return
        if self.outermost:
            trace_begin(self.site)
        if not self.observed:
            return
        _trace(self.owner, args, self.site)
        _trace(self.owner, kwargs, self.site)


class AfterForward(InertWhenCopied):
    """Forward hook of an observed module, or of an outermost one."""

    __slots__ = ("named", "observed", "owner", "site")

    def __init__(self, owner: Owner, named: NamedModule, *, observed: bool) -> None:
        self.owner = owner
        self.named = named
        self.observed = observed
        self.site = new_site(owner, named, "output")

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Observe the outputs, or put that into the graph that is being traced."""
        if not torch.compiler.is_compiling():
            self.owner.guard.run(PART, self.owner.leave, self.named, output)
            return
        if not self.observed or not self.owner.sampling or not torch.is_grad_enabled():
            return
        _trace(self.owner, output, self.site)


def _trace(owner: Owner, value: Any, site: int) -> None:
    trace_tensors(value, site, forward=owner.forward, backward=owner.backward and GRADIENTS_TRACED)
