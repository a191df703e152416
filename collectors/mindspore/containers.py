"""Finds the tensors inside whatever a cell takes or returns."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from mindspore import Tensor

MAX_DEPTH: Final = 8
"""Levels of nesting that are followed: deep enough for any model output, and an end for cyclic objects."""


def tensors_in(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield `(path, tensor)` for each tensor in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield path or "0", value
        return
    if depth >= MAX_DEPTH:
        return
    prefix = f"{path}." if path else ""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{prefix}{key}", depth + 1)
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from tensors_in(item, f"{prefix}{i}", depth + 1)


def tensors_in_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a call: positional ones by number, keyword ones by name."""
    yield from tensors_in(args)
    yield from tensors_in(kwargs)
