"""Finds the tensors inside whatever a cell takes or returns."""

from collections.abc import Iterator, Mapping
from typing import Any

from mindspore import Tensor

from trainsentry.collectors.nested import objects_in


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield `(path, tensor)` for each tensor in nested tuples, lists, mappings and dataclasses."""
    return objects_in(value, Tensor, path)


def tensors_in_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a call: positional ones by number, keyword ones by name."""
    yield from tensors_in(args)
    yield from tensors_in(kwargs)
