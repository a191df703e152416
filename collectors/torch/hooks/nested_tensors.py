"""Finds the tensors in the nested arguments and results of a module."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from torch import Tensor

from trainsentry.collectors.shared.nested import objects_in, objects_in_call


def tensors_in(value: Any, path: str = "") -> Iterable[tuple[str, Tensor]]:
    """Return `(path, tensor)` for each tensor in nested tuples, lists, mappings and dataclasses.

    >>> import torch
    >>> [path for path, _ in tensors_in((torch.ones(1), {"hidden": [torch.ones(1)]}))]
    ['0', '1.hidden.0']
    """
    return ((path or "0", value),) if isinstance(value, Tensor) else objects_in(value, Tensor, path)


def tensors_in_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterable[tuple[str, Tensor]]:
    """Return `(path, tensor)` for each tensor of a call: positional ones by number, keyword ones by name."""
    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):  # most calls, for which nothing is searched
        return (("0", args[0]),)
    return objects_in_call(args, kwargs, Tensor)


_LEAVES: Final = frozenset({int, float, str, bool, bytes, type(None)})


def list_tensors(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors in values, in the order of `tensors_in`; fast for values that are not nested."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif type(value) not in _LEAVES:
            found.extend(tensor for _, tensor in tensors_in(value))
    return found
