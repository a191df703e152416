"""What is different about collectives: they fill tensors that they are given, often later."""

from collections.abc import Mapping
from typing import Any, Final

_FILLED: Final[dict[str, tuple[int, str]]] = {
    "recv": (0, "tensor"),
    "irecv": (0, "tensor"),
    "all_gather": (0, "tensor_list"),
    "gather": (1, "gather_list"),
    "scatter": (0, "tensor"),
    "reduce_scatter": (0, "output"),
    "_reduce_scatter_base": (0, "output"),
    "_all_gather_base": (0, "output_tensor"),
    "all_to_all": (0, "output_tensor_list"),
    "all_to_all_single": (0, "output"),
    "all_gather_into_tensor": (0, "output_tensor"),
    "reduce_scatter_tensor": (0, "output"),
}
"""Collectives that are given a tensor to fill, and which argument that is: what it held before means nothing."""


def is_collective(stem: str) -> bool:
    """Whether a call is one of torch.distributed."""
    return stem.startswith("Distributed.")


def without_buffers(stem: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """Return the arguments without those that are only there to be filled."""
    place = _FILLED.get(stem.removeprefix("Distributed.")) if is_collective(stem) else None
    if place is None:
        return args, kwargs
    kept = tuple(None if i == place[0] else value for i, value in enumerate(args))
    return kept, {name: None if name == place[1] else value for name, value in kwargs.items()}


def changed_by(stem: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what a call without a result of its own changes; None for any other."""
    if is_collective(stem):
        return [*args, *kwargs.values()]
    return args[0] if stem == "Tensor.__setitem__" and args else None


def has_arrived(output: Any) -> bool:
    """Whether a collective has ended, going by what it returned: nothing, a `Work`, or several."""
    works = output if isinstance(output, (list, tuple)) else [output]
    return all(work.is_completed() for work in works if hasattr(work, "is_completed"))
