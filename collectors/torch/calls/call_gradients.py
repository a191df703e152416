"""Collects the gradients at a call's outputs and inputs, and at a module's own parameters.

No node is added to autograd's graph. The nodes that a forward call makes have higher numbers than all earlier ones;
walking from the call's outputs through those nodes finds the edges to its inputs. Hooks on the nodes at both borders
give the call's own gradients, even where a tensor is used elsewhere too or is changed in place.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from trainsentry.collectors.calls.call import PART, Call
from trainsentry.collectors.guard import Guard
from trainsentry.collectors.torch.rows.local_tensor import version_of

MAX_NODES: Final = 100_000
"""Nodes visited per call; of a larger call the gradients at its inputs are left out."""

_LAST: Final = 2**63
"""Nodes that accumulate a leaf's gradient have numbers from here on."""


Edge = tuple[Any, int]
"""A node, and the number of its output that a gradient flows to."""


class Edges:
    """Finds the edges that the gradients of tensors flow to; those of leaves are cached until `forget`."""

    def __init__(self) -> None:
        self._leaves: dict[int, tuple[Tensor, Edge | None]] = {}

    def of(self, tensor: Tensor) -> Edge | None:
        """Return the edge of a tensor; None for one that requires no gradient."""
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
        """Empty the cache of leaves."""
        self._leaves.clear()


def _edge_of_leaf(tensor: Tensor) -> Edge | None:
    try:
        with torch.enable_grad():  # the view's node is linked to the node that accumulates the gradient
            view: Any = tensor.view_as(tensor).grad_fn
    except (RuntimeError, NotImplementedError):  # a layout that has no views
        return None
    return view.next_functions[0][0], 0


class GradientListener(Protocol):
    """Receives the gradients of a call."""

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function so that none of its exceptions reaches the backward pass."""

    def began(self, gradients: "GradientsOfCall") -> bool:
        """Called when a backward pass reaches the call; returns whether its gradients are needed."""

    def arrived(self, place: int, gradient: Tensor) -> Any:
        """Called with the gradient at an output, before it can change; returns what `done` gets for it."""

    def done(self, inputs: list[Any], outputs: list[Tensor | None]) -> None:
        """Called with all gradients, None where there is none: the backward pass's inputs and outputs."""


class GradientsOfCall:
    """Collects the gradients of one call; the inputs of its backward pass belong to the outputs of the call."""

    def __init__(
        self, outputs: Sequence[Tensor], inputs: Sequence[Edge | None], since: int, listener: GradientListener
    ) -> None:
        self.listener = listener
        self.at_outputs: list[Any] = [None] * len(outputs)
        self.at_inputs: list[Tensor | None] = [None] * len(inputs)
        self._versions: list[int | None] = [None] * len(inputs)
        self._listening = False
        self._border: set[int] = set()  # numbers, not nodes: a reference to a node would keep its graph alive
        self._waiting: set[int] = set()
        self._watch(outputs, inputs, since)

    def finish(self) -> None:
        """Pass on the gradients that have arrived, once."""
        if self._listening:
            self._listening = False
            inputs, outputs = self.at_outputs, [self._unless_changed(place) for place in range(len(self.at_inputs))]
            self.at_outputs, self.at_inputs = [None] * len(inputs), [None] * len(outputs)
            self.listener.done(inputs, outputs)

    def arrive(self, places: list[tuple[int, int]], gradients: tuple[Any, ...]) -> None:
        """Take the gradients at outputs of the call, before their node uses them."""
        if self._begin():
            for which, place in places:
                gradient = gradients[which] if which < len(gradients) else None
                self.at_outputs[place] = None if gradient is None else self.listener.arrived(place, gradient)

    def take(self, number: int, places: list[tuple[int, int]], gradients: tuple[Any, ...]) -> None:
        """Take the gradients that a node at the inputs' border has computed."""
        if not self._begin():  # an output that was changed in place later no longer has its own node
            return
        for which, place in places:
            gradient = gradients[which] if which < len(gradients) else None
            if gradient is not None:
                total = self.at_inputs[place] = _sum(self.at_inputs[place], gradient)
                self._versions[place] = version_of(total)
        self._waiting.discard(number)
        if not self._waiting:
            self.finish()

    def _unless_changed(self, place: int) -> Tensor | None:
        """Return the gradient at an input; None when a hook has changed it in place since it was computed."""
        gradient = self.at_inputs[place]
        return gradient if gradient is None or version_of(gradient) == self._versions[place] else None

    def _begin(self) -> bool:
        """Note that a gradient has arrived; return whether the listener needs the gradients."""
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
        to_inputs = _edges_to_inputs(list(starts), targets, since)
        for node, places in starts.items():
            node.register_prehook(_AtOutputs(self, places))
        # Where no input has a gradient, the call's backward pass ends with the gradients at its outputs.
        border = to_inputs or {node: [] for node in starts}
        for number, (node, edges) in enumerate(border.items()):
            self._border.add(number)
            node.register_hook(_AtInputs(self, number, edges))


class _AtOutputs:
    """Hook before a node: takes the gradients at the outputs of the call that the node made."""

    def __init__(self, owner: GradientsOfCall, places: list[tuple[int, int]]) -> None:
        self.owner = owner
        self.places = places

    def __call__(self, gradients: tuple[Any, ...]) -> None:
        with torch._C.DisableTorchFunction():
            self.owner.listener.run(self.owner.arrive, self.places, gradients)


class _AtInputs:
    """Hook after a node: takes the gradients that it sends to inputs of the call."""

    def __init__(self, owner: GradientsOfCall, number: int, places: list[tuple[int, int]]) -> None:
        self.owner = owner
        self.number = number
        self.places = places

    def __call__(self, sent: tuple[Any, ...], got: tuple[Any, ...]) -> None:
        with torch._C.DisableTorchFunction():
            self.owner.listener.run(self.owner.take, self.number, self.places, sent)


def _sum(before: Tensor | None, gradient: Tensor) -> Tensor:
    """Return the sum of two parts of a gradient; a sparse part is added to a dense one, never a dense to a sparse."""
    if before is None:
        return gradient
    with torch.no_grad():
        return gradient + before if before.layout is not torch.strided else before + gradient


def _edges_to_inputs(
    starts: list[Any], targets: dict[Any, list[tuple[int, int]]], since: int
) -> dict[Any, list[tuple[int, int]]]:
    """Return, for each node of the call, its edges to inputs: (number of its gradient, number of the input)."""
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


class ReportsToWatcher:
    """Passes the gradients of one call to the watcher, in the step of the call."""

    __slots__ = ("call", "step", "watcher")

    def __init__(self, watcher: Any, call: Call) -> None:
        self.watcher = watcher
        self.call = call
        self.step = watcher.steps

    def run(self, function: Any, *args: Any) -> Any:
        """Call a function under the watcher's guard."""
        result = self.watcher.guard.run(self.watcher.part, function, *args)
        if self.watcher.after_call is not None:
            self.watcher.after_call()
        return result

    def began(self, gradients: GradientsOfCall) -> bool:
        """Ask the watcher whether the gradients are needed."""
        needed: bool = self.step == self.watcher.steps and self.watcher.backward_begins(self.call, gradients)
        return needed

    def arrived(self, place: int, gradient: Tensor) -> Any:
        """Pass on the gradient at an output."""
        return self.watcher.gradient_arrived(self.call, place, gradient)

    def done(self, inputs: list[Any], outputs: list[Tensor | None]) -> None:
        """Pass on all gradients."""
        self.watcher.backward_done(self.call, inputs, outputs)


class ParameterGradients:
    """Collects the gradients of a module's own parameters; calls `done(gradients by name)` when all have arrived."""

    def __init__(self, guard: Guard, began: Callable[[Any], None], done: Callable[[dict[str, Tensor]], None]) -> None:
        self.guard = guard
        self.began = began
        self.done = done
        self._gradients: dict[str, Tensor] = {}
        self._handles: dict[str, tuple[nn.Parameter, Any]] = {}

    def watch(self, module: nn.Module) -> None:
        """Watch the module's current parameters; FSDP replaces them in each forward pass."""
        for name, parameter in module.named_parameters(recurse=False):
            known = self._handles.get(name)
            if parameter.requires_grad and (known is None or known[0] is not parameter):
                if known is not None:
                    known[1].remove()
                self._handles[name] = (parameter, parameter.register_hook(_AtParameter(self, name)))

    def take(self, name: str, gradient: Tensor) -> None:
        """Take one gradient."""
        if not self._gradients:
            self.began(self)
        self._gradients[name] = gradient
        if len(self._gradients) == len(self._handles):
            self.finish()

    def finish(self) -> None:
        """Pass on the gradients that have arrived."""
        gradients, self._gradients = self._gradients, {}
        if gradients:
            self.done(gradients)

    def close(self) -> None:
        """Remove the hooks."""
        for _, handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self._gradients.clear()


class _AtParameter:
    def __init__(self, owner: ParameterGradients, name: str) -> None:
        self.owner = owner
        self.name = name

    def __call__(self, gradient: Tensor) -> None:
        with torch._C.DisableTorchFunction():
            self.owner.guard.run(PART, self.owner.take, self.name, gradient)
