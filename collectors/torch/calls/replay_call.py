"""Repeats a dumped call on the CPU in double precision, to tell whether any device would overflow."""

import math
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from trainsentry.collectors.torch.calls.call_names import LEFT_OUT
from trainsentry.collectors.torch.hooks.nested_tensors import list_tensors
from trainsentry.collectors.torch.saving import load_tensor

NORMAL: Final = "normal"
ABNORMAL: Final = "abnormal"
UNKNOWN: Final = "unknown"

_HOMES: Final[dict[str, Any]] = {
    "Functional": torch.nn.functional,
    "Tensor": Tensor,
    "Torch": torch,
    "Aten": torch.ops.aten,
}


_WRONG_CALL: Final = (
    ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError
)  # fmt: skip
"""Exceptions that a torch operation raises for arguments it was never called with."""


def replay(call: str, forward: dict[str, Any], gradients: list[Any] | None, folder: Path) -> tuple[str, str]:
    """Return whether a call's overflow is normal (any device overflows) or abnormal, and the reason.

    `forward` is the entry of the forward call; `gradients` is `input` of its backward entry, for an overflow in the
    backward pass; `folder` holds the tensors. The results in double precision are compared with the range of the dtype
    that the call returned.
    """
    function = _function_of(call)
    if function is None:
        return UNKNOWN, f"{call} cannot be replayed: only operations of torch can"
    try:
        args, kwargs = _load(forward.get("input_args", []), folder), _load(forward.get("input_kwargs", {}), folder)
    except (*_WRONG_CALL, OSError, EOFError, pickle.UnpicklingError) as error:
        return UNKNOWN, f"its inputs cannot be loaded: {error}"
    try:
        results, dtypes = _run(function, args, kwargs, forward, gradients, folder)
    except (*_WRONG_CALL, OSError, EOFError, pickle.UnpicklingError) as error:
        return UNKNOWN, f"the replay failed: {error}"
    return _judge(results, dtypes)


def _function_of(call: str) -> Callable[..., Any] | None:
    """Return the torch operation that a name in a dump stands for; None for anything else, which is never called."""
    prefix, _, rest = call.partition(".")
    name = rest.rsplit(".", 2)[0]
    if name in LEFT_OUT and not name.startswith("__"):
        return None
    for home in (_HOMES.get(prefix), torch.linalg if prefix == "Torch" else None):
        function: Any = getattr(home, name, None) if home is not None and "." not in name else None
        if isinstance(function, torch._ops.OpOverloadPacket) or (callable(function) and _is_operation(function)):
            return function  # type: ignore[no-any-return]
    return None


def _is_operation(function: Any) -> bool:
    """Whether a function computes with tensors, so that a mode can intercept it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some names are deprecated
        return (
            torch.overrides.is_tensor_method_or_property(function)
            or function in torch.overrides.get_testing_overrides()
        )


def _run(
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    forward: dict[str, Any],
    gradients: list[Any] | None,
    folder: Path,
) -> tuple[list[Tensor], list[torch.dtype]]:
    """Return the call's results in double precision, and the dtypes of the dumped results."""
    outputs = [t for t in _tensors(forward.get("output", [])) if t is not None]
    if gradients is None:
        with torch.no_grad():
            given = function(*args, **kwargs)
        results = list_tensors([args[0] if given is None else given])
        return results, [_dtype(facts) for facts in outputs] or [torch.float32]
    leaves = [t.requires_grad_() for t in list_tensors((*args, *kwargs.values())) if t.is_floating_point()]
    with torch.enable_grad():
        given = list_tensors([function(*[_alias(a) for a in args], **kwargs)])
    incoming = _load(gradients, folder)
    pairs = [(out, g) for out, g in zip(given, incoming, strict=False) if g is not None and out.requires_grad]
    found = torch.autograd.grad([o for o, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True)
    inputs = [f for f in _tensors([forward.get("input_args", []), forward.get("input_kwargs", {})]) if f is not None]
    floating = [_dtype(f) for f in inputs if _dtype(f).is_floating_point]
    kept = [(g, d) for g, d in zip(found, floating, strict=False) if g is not None]
    return [g for g, _ in kept], [d for _, d in kept]


def _judge(results: list[Tensor], dtypes: list[torch.dtype]) -> tuple[str, str]:
    judged = []
    for number, result in enumerate(r.abs() if r.is_complex() else r for r in results):
        dtype = dtypes[min(number, len(dtypes) - 1)]
        if not result.is_floating_point() or not (dtype.is_floating_point or dtype.is_complex):
            continue
        judged.append(result)
        limit = torch.finfo(dtype).max
        if not bool(result.isfinite().all()):
            return NORMAL, "in double precision on the CPU its results are not finite either"
        largest = float(result.abs().max()) if result.numel() else 0.0
        if largest > limit:
            return NORMAL, f"its largest result is {largest:.4g} in double precision, beyond {dtype}'s {limit:.4g}"
    if not judged:
        return UNKNOWN, "the replay gave nothing that could be judged"
    largest = max((float(r.abs().max()) for r in judged if r.numel()), default=math.nan)
    return (
        ABNORMAL,
        f"in double precision on the CPU its results are finite, at most {largest:.4g}: the device is at fault",
    )


def _alias(value: Any) -> Any:
    """Return a tensor as the result of an operation, so that in-place calls can be replayed."""
    return value * 1 if isinstance(value, Tensor) and value.requires_grad else value


def _load(value: Any, folder: Path) -> Any:
    """Load arguments from their description, floating-point tensors in double precision.

    Raises:
        ValueError: for a tensor that was not saved.

    """
    if isinstance(value, list):
        return [_load(item, folder) for item in value]
    if not isinstance(value, dict):
        return value
    if "dtype" in value and "shape" in value:
        name = value.get("data_name")
        if not isinstance(name, str):
            raise ValueError("a tensor was not saved (task statistics)")
        path = folder / Path(name).name
        if not path.is_file():
            raise ValueError(f"there is no file {path.name}")
        tensor = load_tensor(path)
        if tensor.is_complex():
            return tensor.to(torch.complex128)
        return tensor.double() if tensor.is_floating_point() else tensor
    if "type" in value and "value" in value:
        return _plain(value["type"], value["value"])
    return {key: _load(item, folder) for key, item in value.items()}


def _plain(kind: str, value: Any) -> Any:
    if kind == "torch.dtype":
        dtype = getattr(torch, str(value).rpartition(".")[2], None)
        return torch.float64 if isinstance(dtype, torch.dtype) and dtype.is_floating_point else dtype
    if kind == "torch.device":
        return torch.device("cpu")
    if kind == "slice":
        return slice(*value)
    if kind == "ellipsis":
        return ...
    return tuple(value) if kind == "torch.Size" else value


def _tensors(value: Any) -> list[Any]:
    """Return the descriptions of tensors in a nested description."""
    if isinstance(value, list):
        return [facts for item in value for facts in _tensors(item)]
    if isinstance(value, dict):
        if "dtype" in value and "shape" in value:
            return [value]
        return [facts for item in value.values() for facts in _tensors(item)]
    return []


def _dtype(facts: dict[str, Any]) -> torch.dtype:
    found = getattr(torch, str(facts["dtype"]).rpartition(".")[2], torch.float32)
    return found if isinstance(found, torch.dtype) else torch.float32
