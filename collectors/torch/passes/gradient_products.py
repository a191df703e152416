"""Compares the gradients that a module's backward pass computes with its forward pass, in the modules by turns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from trainsentry.collectors.guard import Guard, InertWhenCopied
from trainsentry.collectors.series import EULER_GAP, Series
from trainsentry.collectors.shared.model_graph import NamedModule
from trainsentry.collectors.torch.device.registry import stream_is_captured
from trainsentry.collectors.torch.hooks.active_modes import changes_operations
from trainsentry.collectors.torch.hooks.compiler import backward_is_compiled
from trainsentry.collectors.torch.hooks.nested_tensors import tensors_in_call
from trainsentry.collectors.torch.passes.inner_products import (
    FLOATS,
    Kept,
    ModuleCall,
    keeps_its_input,
    operation_of,
    own_parameters,
)
from trainsentry.collectors.torch.rows.local_tensor import are_plain
from trainsentry.collectors.torch.rows.step_rows import StepRows

PART: Final = "euler_gap"
"""The part of the monitor that a failure in a backward pass switches off."""

TURNS: Final = 16
"""Sampled steps in which every module has its turn: each takes some twenty launches on a device."""

WITHOUT: Final = frozenset(
    {nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softmax, nn.LogSoftmax, nn.ELU, nn.Mish, nn.Softplus, nn.Hardswish}
)
"""Modules of torch.nn that are of no degree in their input; no subclasses of them."""

MOST_BYTES: Final = 64 * 2**20
"""Bytes of inputs and outputs that a step keeps for this alone until the backward pass has come to them; without its
output, a module's input and its weight are compared with each other."""


class GradientProducts:
    """Appends `euler_gap.<module>.<side>`: by how much inner products part that should be equal.

    A side is the first parameter, `input`, or `gradients` for both against each other where the output is not known.
    What module keeps which identity is left to the rule; only normalizations are known to be of no degree in their
    input. A few modules have their turn in each sampled step. The gradients are those that autograd's node has got and
    returned in this pass, so neither other uses of a tensor nor other ranks have a part in them. A module's input and
    output are kept until then. Nothing waits for the device.
    """

    def __init__(self, rows: StepRows, guard: Guard, *, enabled: bool) -> None:
        self.rows = rows
        self.guard = guard
        self.enabled = enabled
        self.generation = 0
        self._modules: list[NamedModule] = []
        self._turn = self._bytes = 0
        self._chosen: dict[str, NamedModule] = {}
        self._inputs: dict[str, Kept] = {}

    def choose_among(self, modules: Sequence[NamedModule]) -> None:
        """Take turns among the innermost ones of these modules, except those that keep no identity."""
        inner = [m for m in modules if type(m.module) not in WITHOUT and not any(True for _ in m.module.children())]
        self._modules = inner if self.enabled else []
        self._turn = 0

    def open_step(self, *, sampling: bool) -> None:
        """Begin a step; choose the next modules in it if `sampling`."""
        self.close()
        self._bytes = 0
        if sampling and self._modules:
            count = max(1, round(len(self._modules) / TURNS))
            places = range(self._turn, self._turn + count)
            self._chosen = {m.name: m for m in (self._modules[i % len(self._modules)] for i in places)}
            self._turn = (self._turn + count) % len(self._modules)

    def close(self) -> None:
        """Compute nothing from now on, also where a backward pass is still to come."""
        self.generation += 1
        self._chosen.clear()
        self._inputs.clear()

    def enter(self, named: NamedModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Keep the input of a chosen module's call."""
        if self._chosen.get(named.name) is named and torch.is_grad_enabled():
            given = next((tensor for _, tensor in tensors_in_call(args, kwargs)), None)
            if given is not None and are_plain([given]):
                self._inputs[named.name] = Kept.of(given)

    def leave(self, named: NamedModule, output: Any) -> None:
        """Have the products of a chosen module's call computed once its gradients are there."""
        if self._chosen.get(named.name) is not named:
            return
        del self._chosen[named.name]
        given = self._inputs.pop(named.name, None)
        if given is None or changes_operations() or backward_is_compiled() or stream_is_captured():
            return
        if not isinstance(output, Tensor) or output.grad_fn is None or not are_plain([output.detach()]):
            return
        node = operation_of(output)
        own = own_parameters(node, named.module)
        if own is not None:
            has_input = keeps_its_input(node, own) or self._takes(given.tensor)
            kept = Kept.of(output) if self._takes(output) else None
            call = ModuleCall(own, given if has_input else None, kept)
            node.register_hook(_BackwardHook(self, named, call, self.generation))

    def _takes(self, tensor: Tensor) -> bool:
        """Whether a tensor may be kept too."""
        takes = self._bytes + tensor.nbytes <= MOST_BYTES
        self._bytes += tensor.nbytes if takes else 0
        return takes

    def compare(self, named: NamedModule, call: ModuleCall, used: Sequence[Any], arrived: Sequence[Any]) -> None:
        """Append the gaps of a call, whose node has `arrived` gradients and has returned the `used` ones."""
        gradients = [x for x in (*used, *arrived) if x is not None]
        if changes_operations() or stream_is_captured() or not are_plain(gradients):
            return
        if any(x.dtype not in FLOATS for x in gradients):
            return
        with torch.no_grad():
            for side, gap in call.gaps(used, arrived).items():
                name = f"{EULER_GAP}.{named.name}.{side}"
                series = Series(name, name, module=named.name, vpp_stage=named.vpp_stage, scalar=True)
                self.rows.add_scalar(self.rows.table.series_id(series), gap)


@dataclass(slots=True)
class _BackwardHook(InertWhenCopied):
    """Has one pass through a node of autograd looked at."""

    owner: GradientProducts
    named: NamedModule
    call: ModuleCall | None
    generation: int

    def __call__(self, used: Sequence[Any], arrived: Sequence[Any]) -> None:
        if torch.compiler.is_compiling():
            return
        call, self.call = self.call, None
        if call is not None and self.generation == self.owner.generation:
            self.owner.guard.run(PART, self.owner.compare, self.named, call, used, arrived)
