"""Activations inside compiled graphs: operators that the compiler keeps where they are.

A compiler traces the hooks of a module that it inlines, so what they do becomes part of its graph. They call operators
of ours, which the compiler does not look into, and which find their `Site` by number when the graph runs. The number
travels as a tensor, an input of the graph: blocks of one class share their graph then, and no number is a constant
that dynamo guards on. A path begins with the side, `input` or `output`; an empty one marks the beginning of a pass.
"""

import itertools
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from trainsentry.collectors.guard import InertWhenCopied
from trainsentry.collectors.shared.model_graph import NamedModule


class Observer(Protocol):
    """Who is told what runs inside compiled graphs. Its methods contain their own failures."""

    def compiled_pass(self, named: NamedModule) -> None:
        """Note that a pass through an outermost module begins."""

    def compiled_tensor(self, site: "Site", path: str, tensor: Tensor, *, hooked: bool) -> None:
        """Take an input or output; where its gradient is hooked, that will follow."""

    def compiled_gradient(self, site: "Site", path: str, gradient: Tensor) -> None:
        """Take the gradient at an input or output."""


@dataclass(frozen=True, eq=False)
class Site:
    """A hooked module: what the operator's number stands for."""

    number: int
    observer: "weakref.ref[Observer]"
    named: NamedModule


class CompiledVisits:
    """Which call of a pass, and which pass of a step, an observation inside a compiled graph belongs to.

    A graph cannot tell, so visits are counted. In the backward pass calls come in the opposite order; passes come in
    the order of their forwards.
    """

    def __init__(self) -> None:
        self._calls: Counter[tuple[int, str]] = Counter()
        self._hooked: dict[tuple[int, str], tuple[int, list[int]]] = {}
        self._pass = 0
        self._gradients: Counter[tuple[int, str]] = Counter()

    def clear(self) -> None:
        """Begin a step."""
        self._gradients.clear()
        self._hooked.clear()
        self.begin_pass()

    def begin_pass(self) -> None:
        """Begin to count the calls of a pass."""
        self._calls.clear()
        self._pass += 1

    def forward(self, site: Site, path: str, *, hooked: bool) -> int:
        """Count a visit; return the number of the call."""
        key = (site.number, path)
        call = self._calls[key]
        self._calls[key] += 1
        if hooked:  # kept through passes of other models, behind which this one's gradients may come
            known = self._hooked.get(key)
            if known is None or known[0] != self._pass:
                known = self._hooked[key] = (self._pass, [])
            known[1].append(call)
        return call

    def backward(self, site: Site, path: str) -> tuple[int, int]:
        """Count a visit; return the numbers of the pass and of the call."""
        key = (site.number, path)
        _, calls = self._hooked.get(key, (0, [0]))
        micro_step, turn = divmod(self._gradients[key], len(calls))
        self._gradients[key] += 1
        return micro_step, calls[-1 - turn]


_numbers = itertools.count()
_sites: dict[int, Site] = {}


def new_site(observer: "weakref.ref[Observer]", named: NamedModule, number: Tensor | None = None) -> Tensor:
    """Return the number of a site, int64 of shape (); given one of a closed monitor, a site that takes its place.

    The site lives until `forget_sites` is told of the number.
    """
    found = torch.tensor(next(_numbers)) if number is None else number
    _sites[int(found)] = Site(int(found), observer, named)
    return found


def forget_sites(numbers: Iterable[int]) -> None:
    """Forget sites; graphs that were compiled with them run on and observe nothing."""
    for number in numbers:
        _sites.pop(number, None)


def named_at(number: Tensor | None) -> NamedModule | None:
    """Return the module of a site, None where there is none."""
    site = None if number is None else _sites.get(int(number))
    return None if site is None else site.named


def _site(number: Tensor) -> tuple[Site, Observer] | None:
    site = _sites.get(int(number))
    observer = site.observer() if site is not None else None
    return None if site is None or observer is None else (site, observer)


def _observe(_token: Tensor, x: Tensor, number: Tensor, path: str, *, hooked: bool) -> None:
    found = _site(number)
    if found is None:
        return
    site, observer = found
    if path:
        observer.compiled_tensor(site, path, x, hooked=hooked)
    else:
        observer.compiled_pass(site.named)


def _observe_gradient(x: Tensor, number: Tensor, path: str) -> Tensor:
    found = _site(number)
    if found is not None:
        found[1].compiled_gradient(found[0], path, x)
    return x.clone()  # an operator may not return what it was given


_HOST_ONLY: Final = tuple(tag for tag in [getattr(torch.Tag, "cudagraph_unsafe", None)] if tag is not None)
"""Where torch cuts its graphs for CUDA's captures, it leaves these operators out of those: a replay calls no Python."""

_library = torch.library.Library("trainsentry", "FRAGMENT")
_library.define("observe(Tensor(a!) token, Tensor x, Tensor site, str path, *, bool hooked) -> ()", tags=_HOST_ONLY)
_library.define("observe_gradient(Tensor x, Tensor site, str path) -> Tensor", tags=_HOST_ONLY)
_library.impl("observe", _observe, "CompositeExplicitAutograd")
_library.impl("observe_gradient", _observe_gradient, "CompositeExplicitAutograd")
torch.library.register_fake("trainsentry::observe", lambda *_, **__: None, lib=_library)
torch.library.register_fake("trainsentry::observe_gradient", lambda x, *_: torch.empty_like(x), lib=_library)

_token: Final = torch.zeros(1)
"""What the operator says it changes, so that no compiler removes it or moves it across another one.

The gradient's operator has a result that is used instead: a token would be saved for the backward pass, and found
changed by the next forward.
"""

_nothing: Final = torch.zeros(1)


@dataclass(frozen=True, slots=True)
class _ObserveGradient(InertWhenCopied):
    number: Tensor
    path: str

    def __call__(self, gradient: Tensor) -> Tensor:
        passed: Tensor = torch.ops.trainsentry.observe_gradient(gradient, self.number, self.path)
        return passed


def trace_begin(number: Tensor) -> None:
    """Put the beginning of a pass into the graph."""
    torch.ops.trainsentry.observe(_token, _nothing, number, "", hooked=False)


def trace_tensors(value: Any, number: Tensor, side: str, *, forward: bool, backward: bool, path: str = "") -> None:
    """Put the observation of every tensor in `value` into the graph.

    Tuples, lists and dictionaries are followed; what another object holds is left alone. Paths are as in `tensors_in`.
    """
    prefix = f"{path}." if path else ""
    if isinstance(value, Tensor):
        _trace_tensor(value, number, f"{side}.{path or 0}", forward=forward, backward=backward)
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            trace_tensors(item, number, side, forward=forward, backward=backward, path=f"{prefix}{i}")
    elif isinstance(value, dict):
        for key, item in value.items():
            trace_tensors(item, number, side, forward=forward, backward=backward, path=f"{prefix}{key}")


def _trace_tensor(x: Tensor, number: Tensor, path: str, *, forward: bool, backward: bool) -> None:
    hooked = backward and x.requires_grad
    if forward or hooked:  # also counted, so that gradients find their calls
        torch.ops.trainsentry.observe(_token, x.detach(), number, path, hooked=hooked)
    if hooked:
        x.register_hook(_ObserveGradient(number, path))
