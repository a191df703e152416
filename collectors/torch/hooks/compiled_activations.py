"""Observes activations inside compiled graphs, by custom operators that the compiler leaves in place.

A compiler traces the hooks of a module that it inlines, so they become part of its graph. The hooks call custom
operators, which are opaque to the compiler and look up their `Site` by number when the graph runs. The number is a
tensor and an input of the graph, not a constant that dynamo guards on, so that blocks of one class share a graph. A
path begins with the side, `input` or `output`; an empty path marks the beginning of a pass.
"""

import itertools
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from trainsentry.collectors.guard import InertWhenCopied
from trainsentry.collectors.shared.model_graph import NamedModule


class Observer(Protocol):
    """Is called by the operators inside compiled graphs. Its methods contain their own failures."""

    def compiled_pass(self, named: NamedModule) -> None:
        """Note that a pass through an outermost module begins."""

    def compiled_tensor(self, site: "Site", path: str, tensor: Tensor, *, hooked: bool) -> None:
        """Take an input or output; if `hooked`, its gradient will follow."""

    def compiled_gradient(self, site: "Site", path: str, gradient: Tensor) -> None:
        """Take the gradient at an input or output."""


@dataclass(frozen=True, eq=False)
class Site:
    """A hooked module, which an operator identifies by its number; `reference` leads to it, as a model may end."""

    number: int
    observer: "weakref.ref[Observer]"
    reference: "weakref.ref[NamedModule]"

    @property
    def named(self) -> NamedModule:
        """The module, which is there where an operator in its graph runs.

        Raises:
            ReferenceError: where it is not.

        """
        found = self.reference()
        if found is None:
            raise ReferenceError(f"the module of site {self.number} has ended")
        return found


class CompiledVisits:
    """Finds the call of a pass, and the pass of a step, that an observation inside a compiled graph belongs to.

    A graph does not know either, so visits are counted. In the backward pass, calls come in reverse order; passes come
    in the order of their forward passes.
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
        """Begin a pass, whose calls are counted from 0."""
        self._calls.clear()
        self._pass += 1

    def forward(self, site: Site, path: str, *, hooked: bool) -> int:
        """Count a visit; return the number of the call."""
        key = (site.number, path)
        call = self._calls[key]
        self._calls[key] += 1
        if hooked:  # kept during passes of other models, as this one's gradients may come after them
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
    """Create a site and return its number, int64 of shape (); `number` reuses that of a closed monitor's site.

    The site lives until `forget_sites` removes it, or nothing holds `named` any more.
    """
    found = torch.tensor(next(_numbers), device="cpu") if number is None else number
    place = int(found)
    _sites[place] = Site(place, observer, weakref.ref(named, partial(_end, place)))
    return found


def _end(number: int, reference: "weakref.ref[NamedModule]") -> None:
    site = _sites.get(number)
    if site is not None and site.reference is reference:  # a later monitor may have the number
        del _sites[number]


def forget_sites(numbers: Iterable[int]) -> None:
    """Remove sites; graphs compiled with them go on running and observe nothing."""
    for number in numbers:
        _sites.pop(number, None)


def named_at(number: Tensor | None) -> NamedModule | None:
    """Return the module of a site, None for an unknown number."""
    site = None if number is None else _sites.get(int(number))
    return None if site is None else site.reference()


def _site(number: Tensor) -> tuple[Site, Observer] | None:
    site = _sites.get(int(number))
    observer = site.observer() if site is not None else None
    return None if site is None or observer is None or site.reference() is None else (site, observer)


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
    return x.clone()  # an operator must not return its own argument


_HOST_ONLY: Final = tuple(tag for tag in [getattr(torch.Tag, "cudagraph_unsafe", None)] if tag is not None)
"""Tags that make torch keep these operators out of captured CUDA graphs, whose replays call no Python."""

_library = torch.library.Library("trainsentry", "FRAGMENT")
_library.define("observe(Tensor(a!) token, Tensor x, Tensor site, str path, *, bool hooked) -> ()", tags=_HOST_ONLY)
_library.define("observe_gradient(Tensor x, Tensor site, str path) -> Tensor", tags=_HOST_ONLY)
_library.impl("observe", _observe, "CompositeExplicitAutograd")
_library.impl("observe_gradient", _observe_gradient, "CompositeExplicitAutograd")
torch.library.register_fake("trainsentry::observe", lambda *_, **__: None, lib=_library)
torch.library.register_fake("trainsentry::observe_gradient", lambda x, *_: torch.empty_like(x), lib=_library)

_token: Final = torch.zeros(1, device="cpu")
"""The operator's declared mutation, so that no compiler removes it or moves it across another one.

The gradient's operator has a used result instead: autograd would save a token for the backward pass, and find it
changed by the next forward pass.
"""

_nothing: Final = torch.zeros(1, device="cpu")


@dataclass(frozen=True, slots=True)
class _ObserveGradient(InertWhenCopied):
    number: Tensor
    path: str

    def __call__(self, gradient: Tensor) -> Tensor:
        passed: Tensor = torch.ops.trainsentry.observe_gradient(gradient, self.number, self.path)
        return passed


def trace_begin(number: Tensor) -> None:
    """Add an operator to the graph that marks the beginning of a pass."""
    torch.ops.trainsentry.observe(_token, _nothing, number, "", hooked=False)


def trace_tensors(value: Any, number: Tensor, side: str, *, forward: bool, backward: bool, path: str = "") -> None:
    """Add an operator to the graph for each tensor in `value`, with paths as in `tensors_in`.

    Only tuples, lists and dictionaries are searched for tensors.
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
    if forward or hooked:  # a hooked visit is counted too, so that its gradient finds its call
        torch.ops.trainsentry.observe(_token, x.detach(), number, path, hooked=hooked)
    if hooked:
        x.register_hook(_ObserveGradient(number, path))
