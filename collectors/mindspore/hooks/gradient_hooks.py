"""Reads the gradients at tensors without a hook on the tensor itself.

A hook travels with its tensor: when the tensor reaches compiled code, MindSpore 2.10 compiles the hook too, and fails.
Therefore the tensor is passed through an operation that only reports its gradient; the result has the same memory, and
compiled code can take it.
"""

from collections.abc import Callable
from typing import Any, Final

from mindspore import Parameter, Tensor, ops
from mindspore import dtype as mstype

FLOATS: Final = frozenset({mstype.float16, mstype.float32, mstype.float64, mstype.bfloat16})
"""Dtypes that have gradients."""

Arrived = Callable[[str, Tensor], None]
"""Takes the path of a tensor and the gradient at it. It must not raise, or MindSpore keeps calling it."""


def hooked(value: Any, arrived: Arrived, path: str = "", known: "dict[int, Tensor] | None" = None) -> Any:
    """Return a value whose tensors report their gradients; a value without such tensors is returned itself.

    Tensors are hooked, also in tuples, and named as `tensors_in` names them. Parameters are not, nor the contents of
    lists and dictionaries: a cell may write into those, so they must stay the program's own objects. A tensor that
    occurs twice stays one object: `known` holds those of one call.
    """
    known = {} if known is None else known
    if isinstance(value, Tensor):
        if isinstance(value, Parameter) or value.dtype not in FLOATS:
            return value
        if id(value) not in known:
            known[id(value)] = ops.HookBackward(_hook(arrived, path or "0"))(value)
        return known[id(value)]
    if not isinstance(value, tuple):
        return value
    prefix = f"{path}." if path else ""
    items = [hooked(item, arrived, f"{prefix}{i}", known) for i, item in enumerate(value)]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    if type(value) is tuple:
        return tuple(items)
    return type(value)(*items) if hasattr(value, "_fields") else value


def hooked_call(
    args: tuple[Any, ...], kwargs: dict[str, Any], arrived: Arrived
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call, hooked."""
    known: dict[int, Tensor] = {}
    args = hooked(args, arrived, "", known)
    return args, {key: hooked(value, arrived, key, known) for key, value in kwargs.items()}


def _hook(arrived: Arrived, path: str) -> Callable[[Any], None]:
    def hook(gradient: Any) -> None:
        tensor = gradient[0] if isinstance(gradient, tuple) and gradient else gradient
        if isinstance(tensor, Tensor):
            arrived(path, tensor)

    return hook
