"""The gradients at what a call gave and took, without a node of ours in the graph.

A call of the forward pass makes nodes of autograd's graph whose numbers are higher than those before it. Walking from
its outputs through those nodes finds the edges that leave it towards its inputs. Hooks on the nodes at both borders
give the call's own gradients, also where a tensor is used elsewhere too or is changed in place.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

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
        self._leaves: dict[int, tuple[Tensor, Edge]] = {}

    def of(self, tensor: Tensor) -> Edge | None:
        """Return the edge of a tensor; None for one without a gradient."""
        if not tensor.requires_grad:
            return None
        node = tensor.grad_fn
        if node is not None:
            return node, tensor.output_nr
        known = self._leaves.get(id(tensor))
        if known is None or known[0] is not tensor:
            with torch.enable_grad():  # the view is thrown away: its node knows the one that gathers the gradient
                view: Any = tensor.view_as(tensor).grad_fn
            known = self._leaves[id(tensor)] = (tensor, (view.next_functions[0][0], 0))
        return known[1]

    def forget(self) -> None:
        """Let go of every leaf."""
        self._leaves.clear()


class GradientsOfCall:
    """Collects the gradients of one call; `done(inputs, outputs)` gets them when all have come.

    `inputs` are the gradients at the call's outputs, `outputs` those at its inputs, each a list in the order of the
    tensors, None where there is none (a backward pass has inputs and outputs the other way round).
    """

    def __init__(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[tuple[Any, int] | None],
        since: int,
        *,
        began: Callable[["GradientsOfCall"], None],
        done: Callable[[list[Tensor | None], list[Tensor | None]], None],
    ) -> None:
        self.on_begin = began
        self.done = done
        self.at_outputs: list[Tensor | None] = [None] * len(outputs)
        self.at_inputs: list[Tensor | None] = [None] * len(inputs)
        self.began = False
        self._border: set[int] = set()  # numbers, not nodes: a node that we held would keep its graph
        self._waiting: set[int] = set()
        self._watch(outputs, inputs, since)

    def finish(self) -> None:
        """Hand over what has come, once."""
        if self.began:
            self.began = False
            inputs, outputs = self.at_outputs, self.at_inputs
            self.at_outputs, self.at_inputs = [None] * len(inputs), [None] * len(outputs)
            self.done(inputs, outputs)

    def begin(self) -> None:
        """Note that the first gradient has come."""
        if not self.began:
            self.began = True
            self._waiting = set(self._border)
            self.on_begin(self)

    def _watch(self, outputs: Sequence[Tensor], inputs: Sequence[tuple[Any, int] | None], since: int) -> None:
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

    def take(self, number: int, places: list[tuple[int, int]], gradients: tuple[Any, ...]) -> None:
        """Take the gradients that a node at the border towards the inputs has given."""
        for which, place in places:
            gradient = gradients[which] if which < len(gradients) else None
            if gradient is not None:
                before = self.at_inputs[place]
                with torch.no_grad():
                    self.at_inputs[place] = gradient if before is None else before + gradient
        self._waiting.discard(number)
        if not self._waiting:
            self.finish()


class _AtOutputs:
    """Hook before a node: the gradients at outputs of the call that the node made."""

    def __init__(self, owner: GradientsOfCall, places: list[tuple[int, int]]) -> None:
        self.owner = owner
        self.places = places

    def __call__(self, gradients: tuple[Any, ...]) -> None:
        self.owner.begin()
        for number, place in self.places:
            self.owner.at_outputs[place] = gradients[number] if number < len(gradients) else None


class _AtInputs:
    """Hook after a node: the gradients that it sends to inputs of the call."""

    def __init__(self, owner: GradientsOfCall, number: int, places: list[tuple[int, int]]) -> None:
        self.owner = owner
        self.number = number
        self.places = places

    def __call__(self, sent: tuple[Any, ...], got: tuple[Any, ...]) -> None:
        with torch._C.DisableTorchFunction():
            self.owner.begin()  # an output that was changed in place later has lost its own node
            self.owner.take(self.number, self.places, sent)


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
