"""Finds the tensors inside whatever a module takes or returns."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Final

from torch import Tensor

MAX_DEPTH: Final = 8
"""Levels of nesting that are followed: deep enough for any model output, and an end for cyclic objects."""


def tensors_in(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield `(path, tensor)` for each tensor in nested tuples, lists, mappings and dataclasses.

    >>> import torch
    >>> [path for path, _ in tensors_in((torch.ones(1), {"hidden": [torch.ones(1)]}))]
    ['0', '1.hidden.0']
    """
    if isinstance(value, Tensor):
        yield path or "0", value
        return
    if depth >= MAX_DEPTH or value is None or isinstance(value, (str, bytes, int, float)):
        return
    prefix = f"{path}." if path else ""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{prefix}{key}", depth + 1)
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from tensors_in(item, f"{prefix}{i}", depth + 1)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name, None), f"{prefix}{field.name}", depth + 1)


def tensors_in_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a call: positional ones by number, keyword ones by name."""
    yield from tensors_in(args)
    if kwargs:
        yield from tensors_in(kwargs)


_LEAVES: Final = frozenset({int, float, str, bool, bytes, type(None)})


def list_tensors(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors in values, in the order of `tensors_in`; quick where they stand side by side."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif type(value) not in _LEAVES:
            found.extend(tensor for _, tensor in tensors_in(value))
    return found
