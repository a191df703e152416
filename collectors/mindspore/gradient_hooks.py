"""Sees the gradients at tensors without a hook on the tensor itself.

A hook on a tensor goes along with it: where the tensor is handed to a compiled part, MindSpore 2.10 compiles the hook
too, and fails at it. So the tensor is handed on as the result of an operation that does nothing but tell of its
gradient; it has the same memory, and what follows may be compiled.
"""

from collections.abc import Callable
from typing import Any, Final

from mindspore import Parameter, Tensor, ops
from mindspore import dtype as mstype

from trainsentry.collectors.mindspore.containers import MAX_DEPTH

FLOATS: Final = frozenset({mstype.float16, mstype.float32, mstype.float64, mstype.bfloat16})
"""Dtypes that have gradients."""

Arrived = Callable[[str, Tensor], None]
"""Takes the path of a tensor and the gradient at it. It must not raise: MindSpore would keep calling it."""


def followed(value: Any, arrived: Arrived, path: str = "", depth: int = 0) -> Any:
    """Return a value whose tensors tell of their gradients; whatever holds none is the very same object.

    Tensors inside tuples, lists and dictionaries are followed, named as `tensors_in` names them; parameters are not.
    """
    if isinstance(value, Tensor):
        if isinstance(value, Parameter) or value.dtype not in FLOATS:
            return value
        return ops.HookBackward(_hook(arrived, path or "0"))(value)
    prefix = f"{path}." if path else ""
    if depth < MAX_DEPTH and type(value) is dict:
        return {key: followed(item, arrived, f"{prefix}{key}", depth + 1) for key, item in value.items()}
    if depth < MAX_DEPTH and isinstance(value, (tuple, list)):
        items = [followed(item, arrived, f"{prefix}{i}", depth + 1) for i, item in enumerate(value)]
        if any(new is not old for new, old in zip(items, value, strict=True)):
            return _like(value, items)
    return value


def _like(value: Any, items: list[Any]) -> Any:
    """Return items in a sequence of the kind that `value` is; an unknown kind stays as it is."""
    if type(value) in {tuple, list}:
        return type(value)(items)
    return type(value)(*items) if hasattr(value, "_fields") else value


def _hook(arrived: Arrived, path: str) -> Callable[[Any], None]:
    def hook(gradient: Any) -> None:
        tensor = gradient[0] if isinstance(gradient, tuple) and gradient else gradient
        if isinstance(tensor, Tensor):
            arrived(path, tensor)

    return hook
