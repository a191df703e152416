"""The gradients at what a call gave and took, without a node of ours in the graph.

A call of the forward pass makes nodes of autograd's graph whose numbers are higher than those before it. Walking from
its outputs through those nodes finds the edges that leave it towards its inputs. Hooks on the nodes at both borders
give the call's own gradients, also where a tensor is used elsewhere too or is changed in place.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor

MAX_NODES: Final = 100_000
"""Nodes of one call that are visited; a larger call's gradients at its inputs are left out."""

_LAST: Final = 2**63
"""The numbers of nodes that gather a leaf's gradient are beyond this."""


def next_number() -> int:
    """Return the number that the next node of autograd's graph gets on this thread."""
    return int(torch._C._autograd._get_sequence_nr())


Edge = tuple[Any, int]
"""A node, and the number of its output that a gradient flows to."""


class Edges:
    """Finds where the gradients of tensors go; what gathers a leaf's gradient is looked up once until `forget`."""

    def __init__(self) -> None:
        self._leaves: dict[int, tuple[Tensor, Edge | None]] = {}

    def of(self, tensor: Tensor) -> Edge | None:
        """Return the edge of a tensor; None for one without a gradient."""
        if not tensor.requires_grad:
            return None
        node = tensor.grad_fn
        if node is not None:
            return node, tensor.output_nr
        known = self._leaves.get(id(tensor))
        if known is None or known[0] is not tensor:
            known = self._leaves[id(tensor)] = (tensor, _edge_of_leaf(tensor))
        return known[1]

    def forget(self) -> None:
        """Let go of every leaf."""
        self._leaves.clear()


def _edge_of_leaf(tensor: Tensor) -> Edge | None:
    try:
        with torch.enable_grad():  # the view is thrown away: its node knows the one that gathers the gradient
            view: Any = tensor.view_as(tensor).grad_fn
    except (RuntimeError, NotImplementedError):  # a layout that has no views
        return None
    return view.next_functions[0][0], 0


class GradientListener(Protocol):
    """Who is told of the gradients of a call."""

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function so that no mistake in it reaches the backward pass."""

    def began(self, gradients: "GradientsOfCall") -> bool:
        """A backward pass has reached the call; return whether anyone listens."""

    def arrived(self, place: int, gradient: Tensor) -> Any:
        """Return what is to be kept of the gradient at an output, while it is as it came."""

    def done(self, inputs: list[Any], outputs: list[Tensor | None]) -> None:
        """All have come: what was kept of those at the outputs, and those at the inputs; None where there is none."""


class GradientsOfCall:
    """Collects the gradients of one call: a backward pass has inputs and outputs the other way round."""

    def __init__(
        self, outputs: Sequence[Tensor], inputs: Sequence[Edge | None], since: int, listener: GradientListener
    ) -> None:
        self.listener = listener
        self.at_outputs: list[Any] = [None] * len(outputs)
        self.at_inputs: list[Tensor | None] = [None] * len(inputs)
        self._listening = False
        self._border: set[int] = set()  # numbers, not nodes: a node that we held would keep its graph
        self._waiting: set[int] = set()
        self._watch(outputs, inputs, since)

    def finish(self) -> None:
        """Hand over what has come, once."""
        if self._listening:
            self._listening = False
            inputs, outputs = self.at_outputs, self.at_inputs
            self.at_outputs, self.at_inputs = [None] * len(inputs), [None] * len(outputs)
            self.listener.done(inputs, outputs)

    def arrive(self, places: list[tuple[int, int]], gradients: tuple[Any, ...]) -> None:
        """Take the gradients at outputs of the call, before the node that made them works with them."""
        if self._begin():
            for which, place in places:
                gradient = gradients[which] if which < len(gradients) else None
                self.at_outputs[place] = None if gradient is None else self.listener.arrived(place, gradient)

    def take(self, number: int, places: list[tuple[int, int]], gradients: tuple[Any, ...]) -> None:
        """Take the gradients that a node at the border towards the inputs has given."""
        if not self._begin():  # an output that was changed in place later has lost its own node
            return
        for which, place in places:
            gradient = gradients[which] if which < len(gradients) else None
            if gradient is not None:
                self.at_inputs[place] = _sum(self.at_inputs[place], gradient)
        self._waiting.discard(number)
        if not self._waiting:
            self.finish()

    def _begin(self) -> bool:
        """Note that a gradient has come; return whether anyone listens: else nothing is kept."""
        if not self._listening and self.listener.began(self):
            self._listening = True
            self._waiting = set(self._border)
        return self._listening

    def _watch(self, outputs: Sequence[Tensor], inputs: Sequence[Edge | None], since: int) -> None:
        targets: dict[Any, list[tuple[int, int]]] = {}
        for place, edge in enumerate(inputs):
            if edge is not None:
                targets.setdefault(edge[0], []).append((edge[1], place))
        starts: dict[Any, list[tuple[int, int]]] = {}
        for place, tensor in enumerate(outputs):
            if tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= since:
                starts.setdefault(tensor.grad_fn, []).append((tensor.output_nr, place))
        leaving = _edges_that_leave(list(starts), targets, since)
        for node, places in starts.items():
            node.register_prehook(_AtOutputs(self, places))
        # Where no input has a gradient, the call is over when its outputs' gradients are there.
        border = leaving or {node: [] for node in starts}
        for number, (node, edges) in enumerate(border.items()):
            self._border.add(number)
            node.register_hook(_AtInputs(self, number, edges))


class _AtOutputs:
    """Hook before a node: the gradients at outputs of the call that the node made."""

    def __init__(self, owner: GradientsOfCall, places: list[tuple[int, int]]) -> None:
        self.owner = owner
        self.places = places

    def __call__(self, gradients: tuple[Any, ...]) -> None:
        with torch._C.DisableTorchFunction():
            self.owner.listener.run(self.owner.arrive, self.places, gradients)


class _AtInputs:
    """Hook after a node: the gradients that it sends to inputs of the call."""

    def __init__(self, owner: GradientsOfCall, number: int, places: list[tuple[int, int]]) -> None:
        self.owner = owner
        self.number = number
        self.places = places

    def __call__(self, sent: tuple[Any, ...], got: tuple[Any, ...]) -> None:
        with torch._C.DisableTorchFunction():
            self.owner.listener.run(self.owner.take, self.number, self.places, sent)


def _sum(before: Tensor | None, gradient: Tensor) -> Tensor:
    """Return the sum of two parts of a gradient; a sparse one is added to a dense one, never the other way round."""
    if before is None:
        return gradient
    with torch.no_grad():
        return gradient + before if before.layout is not torch.strided else before + gradient


def _edges_that_leave(
    starts: list[Any], targets: dict[Any, list[tuple[int, int]]], since: int
) -> dict[Any, list[tuple[int, int]]]:
    """Return, for each node of the call, its edges to an input: (which of its gradients, which input)."""
    found: dict[Any, list[tuple[int, int]]] = {}
    seen = set(starts)
    stack = list(starts)
    while stack:
        if len(seen) > MAX_NODES:
            return {}
        node = stack.pop()
        for which, (following, number) in enumerate(node.next_functions):
            if following is None:
                continue
            for wanted, place in targets.get(following, ()):
                if wanted == number:
                    found.setdefault(node, []).append((which, place))
            if following not in seen and since <= following._sequence_nr() < _LAST and following not in targets:
                seen.add(following)
                stack.append(following)
    return found
