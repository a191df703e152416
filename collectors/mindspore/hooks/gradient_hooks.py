"""Sees the gradients at tensors without a hook on the tensor itself.

A hook on a tensor goes along with it: where the tensor is handed to a compiled part, MindSpore 2.10 compiles the hook
too, and fails at it. So the tensor is handed on as the result of an operation that does nothing but tell of its
gradient; it has the same memory, and what follows may be compiled.
"""

from collections.abc import Callable
from typing import Any, Final

from mindspore import Parameter, Tensor, ops
from mindspore import dtype as mstype

FLOATS: Final = frozenset({mstype.float16, mstype.float32, mstype.float64, mstype.bfloat16})
"""Dtypes that have gradients."""

Arrived = Callable[[str, Tensor], None]
"""Takes the path of a tensor and the gradient at it. It must not raise: MindSpore would keep calling it."""


def followed(value: Any, arrived: Arrived, path: str = "", known: "dict[int, Tensor] | None" = None) -> Any:
    """Return a value whose tensors tell of their gradients; whatever holds none is the very same object.

    Tensors and those in tuples are followed, named as `tensors_in` names them; parameters are not, nor what lists and
    dictionaries hold: a cell may write into them, so they must stay the program's own. A tensor that is given twice is
    still one object after it: `known` holds those of one call.
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
    items = [followed(item, arrived, f"{prefix}{i}", known) for i, item in enumerate(value)]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    if type(value) is tuple:
        return tuple(items)
    return type(value)(*items) if hasattr(value, "_fields") else value


def followed_call(
    args: tuple[Any, ...], kwargs: dict[str, Any], arrived: Arrived
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call, followed."""
    known: dict[int, Tensor] = {}
    args = followed(args, arrived, "", known)
    return args, {key: followed(value, arrived, key, known) for key, value in kwargs.items()}


def _hook(arrived: Arrived, path: str) -> Callable[[Any], None]:
    def hook(gradient: Any) -> None:
        tensor = gradient[0] if isinstance(gradient, tuple) and gradient else gradient
        if isinstance(tensor, Tensor):
            arrived(path, tensor)

    return hook
