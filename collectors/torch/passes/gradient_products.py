"""Compares the gradients that a module's backward pass computes with its forward pass, in the modules by turns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from trainsentry.collectors.guard import Guard, InertWhenCopied
from trainsentry.collectors.series import EULER_GAP, Series
from trainsentry.collectors.shared.model_graph import NamedModule
from trainsentry.collectors.torch.device.registry import stream_is_captured
from trainsentry.collectors.torch.hooks.active_modes import changes_operations
from trainsentry.collectors.torch.hooks.compiler import backward_is_compiled
from trainsentry.collectors.torch.hooks.nested_tensors import tensors_in_call
from trainsentry.collectors.torch.passes.inner_products import FLOATS, Kept, ModuleCall, operation_of, own_parameters
from trainsentry.collectors.torch.rows.local_tensor import are_plain
from trainsentry.collectors.torch.rows.step_rows import StepRows

PART: Final = "euler_gap"
"""The part of the monitor that a failure in a backward pass switches off."""

TURNS: Final = 8
"""Sampled steps in which every module has its turn."""

MOST_BYTES: Final = 64 * 2**20
"""Bytes of the inputs and outputs that a step keeps until the backward pass has come to them, and of one gradient;
copies in float32 are made of a module's at a time."""


class GradientProducts:
    """Appends `euler_gap.<module>.<parameter>` and `.input`: by how much inner products part that should be equal.

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
        """Take turns among the innermost ones of these modules."""
        self._modules = [m for m in modules if self.enabled and not any(True for _ in m.module.children())]
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
        self._bytes += given.tensor.nbytes + output.nbytes
        node = operation_of(output)
        own = own_parameters(node, named.module)
        if own is not None and self._bytes <= MOST_BYTES:
            call = ModuleCall(own, given, Kept.of(output))
            node.register_hook(_BackwardHook(self, named, call, self.generation))

    def compare(self, named: NamedModule, call: ModuleCall, used: Sequence[Any], arrived: Sequence[Any]) -> None:
        """Append the gaps of a call, whose node has `arrived` gradients and has returned the `used` ones."""
        gradients = [x for x in (*used, *arrived) if x is not None]
        if changes_operations() or stream_is_captured() or not are_plain(gradients):
            return
        if any(x.dtype not in FLOATS or x.nbytes > MOST_BYTES for x in gradients):
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
