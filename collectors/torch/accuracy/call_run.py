"""Runs a call forward and backward, on a device as it is or on the CPU in a better precision."""

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainsentry.collectors.calls.both_sides import RAISED, CallResults, first_line
from trainsentry.collectors.shared.nested import mapped
from trainsentry.collectors.torch.accuracy.precision import Precision, default_dtype
from trainsentry.collectors.torch.hooks.nested_tensors import list_tensors


@dataclass(frozen=True)
class BuiltCall:
    """A call with its arguments on the CPU, and the gradients at its outputs (None for no backward pass).

    `first_places` has, for each tensor among the arguments, the place of the first that was the same tensor, as in
    `x * x`; such places share one gradient, which stands at the first. None: the gradient at each place is its own.
    """

    function: Callable[..., Any]
    operation: str
    args: list[Any]
    kwargs: dict[str, Any]
    gradients: list[Any] | None
    autocast: torch.dtype | None
    first_places: list[int] | None = None


def run_on_device(call: BuiltCall, device: torch.device) -> CallResults:
    """Run a call as it was recorded.

    Raises:
        Exception: one of RAISED, of the forward pass.

    """

    def place(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().to(device, copy=True)
        return device if isinstance(value, torch.device) else value

    context = nullcontext() if call.autocast is None else torch.autocast(device.type, call.autocast)
    with context:
        return _run(call, place)


def run_in_precision(call: BuiltCall, precision: Precision, moved: float = 0.0, seed: int = 0) -> CallResults:
    """Run a call on the CPU in a better precision; `moved` changes each input by up to that share of itself.

    Plain numbers are moved too, but for whole ones, which a device does not round: some kernels round the 0.999 of an
    optimizer to float32, and some do not.

    Raises:
        Exception: one of RAISED, of the forward pass.

    """
    generator = torch.Generator().manual_seed(seed)

    def raise_(value: Any) -> Any:
        better = precision.raised(value)
        if moved and isinstance(better, Tensor) and (better.is_floating_point() or better.is_complex()):
            if better.is_complex():  # both parts by themselves: a common factor would keep the angle
                parts = torch.view_as_real(better.resolve_conj())
                return torch.view_as_complex(_moved(parts, moved, generator))
            return _moved(better, moved, generator)
        if moved and isinstance(better, float) and math.isfinite(better) and not better.is_integer():
            return better * (1 + moved * float(torch.rand((), generator=generator, dtype=torch.float64) * 2 - 1))
        return better

    with default_dtype(precision.target if precision.single else torch.get_default_dtype()):
        return _run(call, raise_)


def _moved(tensor: Tensor, share: float, generator: torch.Generator) -> Tensor:
    shift = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * 2 - 1
    return tensor * (1 + share * shift).to(tensor.dtype)


def _run(call: BuiltCall, place: Callable[[Any], Any]) -> CallResults:
    leaves: list[Tensor] = []

    def take(value: Any) -> Any:
        placed = place(value)
        if not isinstance(value, Tensor):
            return placed
        differentiable = placed.is_floating_point() or placed.is_complex()
        if call.gradients is None or not value.requires_grad or not differentiable:
            leaves.append(placed)
            return placed
        leaves.append(placed.requires_grad_())
        return placed.clone()  # an in-place call must not change a leaf

    args, kwargs = mapped(call.args, take), mapped(call.kwargs, take)
    with torch.set_grad_enabled(call.gradients is not None), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the training has shown them already
        given = call.function(*args, **kwargs)
    outputs = flat_values(args[0] if given is None and args else given)
    if call.gradients is None:
        return CallResults(outputs, [])
    try:
        gradients = _backward(outputs, leaves, mapped(call.gradients, place))
        return CallResults(outputs, _summed(gradients, call.first_places))
    except RAISED as error:
        return CallResults(outputs, [], first_line(error))


def _backward(outputs: list[Any], leaves: list[Tensor], gradients: list[Any]) -> list[Tensor | None]:
    """Return the gradient at each argument; gradients that were dumped belong to the outputs in their order."""
    incoming = [g for g in gradients if g is None or isinstance(g, Tensor)]
    tensors = [o for o in outputs if isinstance(o, Tensor)]
    if len(incoming) < len(tensors):  # only those that require one were dumped
        tensors = [t for t in tensors if t.requires_grad]
    pairs = [
        (output, g.to(output.dtype) if output.dtype != g.dtype else g)
        for output, g in zip(tensors, incoming, strict=False)
        if g is not None and output.requires_grad
    ]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not pairs or not wanted:
        return []
    found = iter(torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True))
    return [next(found) if leaf.requires_grad else None for leaf in leaves]


def _summed(gradients: list[Tensor | None], first_places: list[int] | None) -> list[Tensor | None]:
    """Return the gradients with those of one and the same tensor added up at its first place."""
    if first_places is None or len(first_places) != len(gradients):
        return gradients
    sums: list[Tensor | None] = [None] * len(gradients)
    for first, gradient in zip(first_places, gradients, strict=True):
        if gradient is not None:
            before = sums[first]
            sums[first] = gradient if before is None else before + gradient
    return sums


def flat_values(value: Any) -> list[Any]:
    """Return the tensors, numbers and texts in nested results."""
    if isinstance(value, (Tensor, bool, int, float, str)):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [item for part in value for item in flat_values(part)]
    return list_tensors([value])
