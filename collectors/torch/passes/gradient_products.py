"""Compares the gradients that a module's backward pass computes with its forward pass, in the modules by turns."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from threading import get_ident
from typing import Any, Final

import torch
from torch import Tensor, nn

from trainsentry.collectors.guard import Guard, InertWhenCopied
from trainsentry.collectors.series import EULER_GAP, Series
from trainsentry.collectors.shared.model_graph import NamedModule
from trainsentry.collectors.torch.device.registry import device_of, stream_is_captured
from trainsentry.collectors.torch.passes.inner_products import (
    FLOATS,
    ModuleCall,
    Operand,
    keeps_its_input,
    own_parameters,
)
from trainsentry.collectors.torch.passes.operation_nodes import is_python_function, operation_of
from trainsentry.collectors.torch.rows.local_tensor import are_plain, version_of
from trainsentry.collectors.torch.rows.step_rows import StepRows

PART: Final = "euler_gap"
"""The part of the monitor that a failure in a backward pass switches off."""

TURNS: Final = 16
"""Sampled steps in which every module has its turn: each takes some twenty launches on a device."""

FIRST_DEGREE: Final = frozenset(
    {
        nn.ReLU, nn.LeakyReLU, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d,
        nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
        nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d,
    }
)  # fmt: skip
"""Modules of torch.nn without parameters that are of the first degree in any input; others, as `nn.ReLU6`, may be so
until an element reaches a bound. Functions that are written in Python are looked at too: kernels of one's own hide in
them."""

MOST_BYTES: Final = 64 * 2**20
"""Bytes of inputs and outputs that a step keeps for this alone until the backward pass has come to them; without its
output, a module's input and its weight are compared with each other."""


class GradientProducts:
    """Appends `euler_gap.<module>.<side>`: by how much inner products part that should be equal.

    A side is the first parameter, `input`, or `gradients` for both against each other where the output is not known.
    What module keeps which identity is left to the rule; only normalizations are known to be of no degree in their
    input. A few modules have their turn in each sampled step. The gradients are those that autograd's node has got and
    returned in this pass, so neither other uses of a tensor nor other ranks have a part in them. A module's input and
    output are kept until then. Nothing waits for the device, and nothing is looked at where `may_look` says no.
    """

    def __init__(self, rows: StepRows, guard: Guard, may_look: Callable[[], bool], *, enabled: bool) -> None:
        self.rows = rows
        self.guard = guard
        self.may_look = may_look
        self.enabled = enabled
        self.generation = 0
        self._modules: list[NamedModule] = []
        self._turn = self._bytes = 0
        self._has_begun = False
        self._chosen: dict[str, NamedModule] = {}
        # By module and thread, as replicas of a model run beside each other: the input, and its node of autograd.
        self._inputs: dict[tuple[str, int], tuple[Operand, Any]] = {}

    def choose_among(self, modules: Sequence[NamedModule]) -> None:
        """Take turns among the innermost ones of these modules, except those that keep no identity."""
        self._modules = [m for m in modules if self.enabled and _may_keep_it(m.module)]
        self._turn, self._has_begun = 0, False

    def open_step(self, *, sampling: bool) -> None:
        """Begin a step; choose the next modules in it if `sampling`."""
        self.close()
        self._bytes = 0
        begun, self._has_begun = self._has_begun, self._has_begun or sampling
        if sampling and begun and self._modules:  # a compiled backward pass must show itself first
            count = max(1, round(len(self._modules) / TURNS))
            places = range(self._turn, self._turn + count)
            self._chosen = {m.name: m for m in (self._modules[i % len(self._modules)] for i in places)}
            self._turn = (self._turn + count) % len(self._modules)

    def close(self) -> None:
        """Compute nothing from now on, also where a backward pass is still to come."""
        self.generation += 1
        self._chosen.clear()
        self._inputs.clear()

    def enter(self, named: NamedModule, given: Iterable[tuple[str, Tensor]]) -> None:
        """Keep the input of a chosen module's call, the first of the tensors that it is given."""
        if named.name in self._chosen and torch.is_grad_enabled():
            self.guard.run(PART, self._keep, named, given)

    def _keep(self, named: NamedModule, tensors: Iterable[tuple[str, Tensor]]) -> None:
        given = next((tensor for _, tensor in tensors), None)
        if given is None or device_of(given).overflow_flag() is not None:
            return  # any result that is not finite sets it, and here gradients of zeros give one
        if are_plain([given.detach()]):
            self._inputs[named.name, get_ident()] = Operand(given.detach(), version_of(given)), given.grad_fn

    def leave(self, named: NamedModule, output: Any) -> None:
        """Have the products of a chosen module's call computed once its gradients are there."""
        if named.name in self._chosen:
            self.guard.run(PART, self._follow, named, output)

    def _follow(self, named: NamedModule, output: Any) -> None:
        given, before = self._inputs.pop((named.name, get_ident()), (None, None))
        if self._chosen.pop(named.name, None) is not named or given is None:
            return
        if not self.may_look() or stream_is_captured():
            return
        if not isinstance(output, Tensor) or output.grad_fn is None or not are_plain([output.detach()]):
            return
        node = operation_of(output, before)
        own = own_parameters(node, named.module) if node is not None else None
        if own is not None and (own or is_python_function(node) or type(named.module) in FIRST_DEGREE):
            has_input = keeps_its_input(node, own) or self._takes(given.tensor)
            kept = Operand(output.detach(), version_of(output)) if self._takes(output) else None
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
        if not self.may_look() or stream_is_captured() or not are_plain(gradients):
            return
        if any(x.dtype not in FLOATS for x in gradients):
            return
        with torch.no_grad():
            for side, gap in call.gaps(used, arrived).items():
                name = f"{EULER_GAP}.{named.name}.{side}"
                series = Series(name, name, module=named.name, vpp_stage=named.vpp_stage, scalar=True)
                self.rows.add_scalar(self.rows.table.series_id(series), gap)


def _may_keep_it(module: nn.Module) -> bool:
    """Whether a module may keep the identity.

    It is an innermost one whose weights ZeRO-3 does not lend. A table with padding leaves gradients out, and one that
    scales them by frequency changes them. Of torch's own modules without parameters only some are of the first degree.
    """
    if any(True for _ in module.children()) or any(hasattr(p, "ds_id") for p in module.parameters()):
        return False
    if getattr(module, "padding_idx", None) is not None or getattr(module, "scale_grad_by_freq", False):
        return False
    is_torchs = type(module).__module__.startswith("torch.nn.")
    return not is_torchs or type(module) in FIRST_DEGREE or any(True for _ in module.parameters())


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
