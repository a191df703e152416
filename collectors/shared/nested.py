"""Finds and replaces objects in the nested arguments and results of a call."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Final, TypeVar

Kind = TypeVar("Kind")

MAX_DEPTH: Final = 8
"""Levels of nesting to search: deep enough for any model output, and a bound for cyclic objects."""


def objects_in(value: Any, kind: type[Kind], path: str = "", depth: int = 0) -> Iterator[tuple[str, Kind]]:
    """Yield `(path, object)` for each object of a kind in nested tuples, lists, mappings and dataclasses.

    >>> list(objects_in((1.5, {"hidden": [2.5]}), float))
    [('0', 1.5), ('1.hidden.0', 2.5)]
    """
    if isinstance(value, kind):
        yield path or "0", value
        return
    if depth >= MAX_DEPTH or value is None or isinstance(value, (str, bytes, int, float)):
        return
    prefix = f"{path}." if path else ""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from objects_in(item, kind, f"{prefix}{key}", depth + 1)
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from objects_in(item, kind, f"{prefix}{i}", depth + 1)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from objects_in(getattr(value, field.name, None), kind, f"{prefix}{field.name}", depth + 1)


def objects_in_call(args: tuple[Any, ...], kwargs: Mapping[str, Any], kind: type[Kind]) -> Iterator[tuple[str, Kind]]:
    """Yield the objects of a kind in a call's arguments: positional ones by number, keyword ones by name."""
    yield from objects_in(args, kind)
    if kwargs:
        yield from objects_in(kwargs, kind)


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return nested tuples, lists and mappings with every other value replaced by `change(value)`.

    >>> mapped([1, {"a": (2, 3)}], lambda x: -x)
    [-1, {'a': (-2, -3)}]
    """
    if isinstance(value, (tuple, list)):
        items = [mapped(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        return {key: mapped(item, change) for key, item in value.items()}
    return change(value)
