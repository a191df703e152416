"""Runs a call forward and backward, as it is or in a better precision."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import mindspore as ms
import numpy as np
from mindspore import Tensor

from trainsentry.collectors.calls.both_sides import RAISED, CallResults, as_single, first_line
from trainsentry.collectors.calls.call_check import NotComparableError
from trainsentry.collectors.mindspore.calls.tensor_facts import DTYPES
from trainsentry.collectors.mindspore.hooks.gradient_hooks import FLOATS
from trainsentry.collectors.mindspore.runtime import on_host, wait
from trainsentry.collectors.shared.nested import mapped

_NO_KERNEL: Final = re.compile(
    r"unregistered|Select CPU operator|Create kernelmod for op|does not support this kernel data type"
    r"|only supports? Ascend|the input argument\[\w+\] must be a type of"
)
"""What MindSpore 2.10 says when a device has no kernel for an operation, or none for these dtypes."""

_BETTER: Final = {ms.float16: ms.float32, ms.bfloat16: ms.float32, ms.float32: ms.float64}


@dataclass(frozen=True)
class BuiltCall:
    """A call with its arguments, and the gradients at its outputs (None for no backward pass)."""

    function: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    gradients: list[Any] | None


@dataclass(frozen=True)
class Precision:
    """The dtype that floating-point tensors are raised to; `single` says that the call itself is in float32."""

    target: Any
    single: bool

    def raised(self, value: Any) -> Any:
        """Return an argument in the better precision; see `collectors.torch.accuracy.precision` for plain numbers."""
        if isinstance(value, Tensor):
            return value.astype(self.target) if value.dtype in FLOATS else value.copy()
        if type(value) is float:
            return as_single(value) if self.single else value
        if not isinstance(value, DTYPES) or value not in _BETTER:
            return value
        better = _BETTER[value]
        return ms.float64 if better == ms.float32 and self.single else better


def better_precision(tensors: list[Tensor]) -> Precision:
    """Return the better precision of a call on these tensors: float32 if all are half, else float64."""
    dtypes = {t.dtype for t in tensors if t.dtype in FLOATS}
    only_half = bool(dtypes) and dtypes <= {ms.float16, ms.bfloat16}
    return Precision(ms.float32 if only_half else ms.float64, single=not only_half and ms.float64 not in dtypes)


def run_on_device(call: BuiltCall) -> CallResults:
    """Run a call as it was recorded.

    Raises:
        NotComparableError: when the CPU has no kernel for it.
        Exception: one of RAISED, of the forward pass.

    """
    try:
        return _run(call, lambda value: value.copy() if isinstance(value, Tensor) else value)
    except RAISED as error:
        if lacks_kernel(str(error)):
            raise NotComparableError(f"has no kernel on the CPU: {first_line(error)}") from None
        raise


def lacks_kernel(error: str) -> bool:
    """Whether an error says that the CPU has no kernel, where the CPU stands in for the device of the dump."""
    return on_host() and _NO_KERNEL.search(error) is not None


def run_in_precision(call: BuiltCall, precision: Precision, moved: float = 0.0, seed: int = 0) -> CallResults:
    """Run a call in a better precision; `moved` changes each input by up to that share of itself.

    Plain numbers are moved too, but for whole ones, which a device does not round.

    Raises:
        Exception: one of RAISED, of the forward pass.

    """
    generator = np.random.default_rng(seed)

    def shifts(shape: tuple[int, ...]) -> Any:
        return 1.0 + moved * (generator.random(shape) * 2 - 1)

    def raise_(value: Any) -> Any:
        better = precision.raised(value)
        if moved and isinstance(better, Tensor) and better.dtype in FLOATS:
            array = better.asnumpy()
            return Tensor(np.asarray(array * shifts(array.shape), dtype=array.dtype))
        if moved and type(better) is float and math.isfinite(better) and not better.is_integer():
            return better * float(shifts(()))
        return better

    return _run(call, raise_)


def _run(call: BuiltCall, place: Callable[[Any], Any]) -> CallResults:
    """Run a call; its gradients are those at every tensor among its arguments, None where it is no floating one."""
    leaves: list[Tensor] = []

    def take(value: Any) -> Any:
        placed = place(value)
        if isinstance(value, Tensor):
            leaves.append(placed)
        return placed

    args, kwargs = mapped(call.args, take), mapped(call.kwargs, take)
    wait()
    if call.gradients is None:
        return CallResults(_outputs(call.function(*args, **kwargs), leaves), [])
    gradients = [place(g) for g in call.gradients if isinstance(g, Tensor)]
    return _differentiated(call.function, (args, kwargs), leaves, gradients)


def _differentiated(
    function: Callable[..., Any], given: tuple[list[Any], dict[str, Any]], leaves: list[Tensor], gradients: list[Tensor]
) -> CallResults:
    """Run a call forward, then backward from the gradients at its outputs."""
    wanted = [i for i, leaf in enumerate(leaves) if leaf.dtype in FLOATS]
    outputs: list[Any] = []
    received: list[Tensor] = []

    def forward(*inputs: Tensor) -> Any:
        of = {id(leaves[i]): tensor for i, tensor in zip(wanted, inputs, strict=True)}
        args, kwargs = mapped(given, lambda value: of.get(id(value), value))
        outputs.extend(_outputs(function(*args, **kwargs), []))
        pairs = _matched(outputs, gradients)
        received.extend(gradient for _, gradient in pairs)
        return tuple(output for output, _ in pairs)

    if not wanted or not gradients:
        return CallResults(_outputs(function(*given[0], **given[1]), leaves), [])
    try:
        _, backward = ms.vjp(forward, *(leaves[i] for i in wanted))
        found = backward(tuple(received))
        wait()
    except RAISED as error:
        if not outputs:
            raise
        return CallResults(outputs, [], first_line(error) if received else "the dumped gradients fit no output")
    of = dict(zip(wanted, found, strict=True))
    return CallResults(outputs, [of.get(i) for i in range(len(leaves))])


def _matched(outputs: list[Any], gradients: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return outputs with the gradients that belong to them: in their order, and where some are missing, by shape."""
    waiting = list(gradients)
    tensors = [o for o in outputs if isinstance(o, Tensor) and o.dtype in FLOATS]
    found = []
    for output in tensors:
        if waiting and waiting[0].shape == output.shape:
            gradient = waiting.pop(0)
            found.append((output, gradient if gradient.dtype == output.dtype else gradient.astype(output.dtype)))
        elif waiting and len(waiting) >= len(tensors):
            waiting.pop(0)
    return found


def _outputs(given: Any, leaves: list[Tensor]) -> list[Any]:
    """Return the results of a call as one list, complete; a call without a result has changed its first tensor."""
    found = _flat(leaves[0] if given is None and leaves else given)
    wait()
    return found


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (Tensor, bool, int, float, str)):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [item for part in value for item in _flat(part)] if isinstance(value, (list, tuple)) else []
