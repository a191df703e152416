"""Describes a call's arguments and results as plain data; the caller supplies the description of tensors."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from trainsentry.collectors.shared.nested import MAX_DEPTH

TensorTaker = Callable[[Tensor, str], Any]
"""Describes a tensor, given the tensor and its path in the call, such as `0` or `1.hidden`."""

MAX_ITEMS: Final = 4096
"""Items described per list: a list of numbers may be a data set."""


def describe(value: Any, path: str, take: TensorTaker, depth: int = 0) -> Any:
    """Return `value` as plain data.

    >>> describe((1, [torch.Size([2])]), "", lambda tensor, path: path)
    [{'type': 'int', 'value': 1}, [{'type': 'torch.Size', 'value': [2]}]]
    """
    if isinstance(value, Tensor):
        return take(value, path)
    if value is None:
        return None
    if isinstance(value, (bool, int, float, str)):
        return {"type": type(value).__name__, "value": value}
    if depth < MAX_DEPTH and not isinstance(value, torch.Size):
        prefix = f"{path}." if path else ""
        if isinstance(value, (list, tuple)):
            return [describe(value[i], f"{prefix}{i}", take, depth + 1) for i in range(min(len(value), MAX_ITEMS))]
        named = _named_in(value)
        if named is not None:
            return {key: describe(item, f"{prefix}{key}", take, depth + 1) for key, item in named.items()}
    return _describe_object(value)


def _named_in(value: Any) -> dict[str, Any] | None:
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name, None) for f in fields(value)}
    return None


def _describe_object(value: Any) -> Any:
    """Return the description of an object that is neither a tensor, a container nor a number."""
    if isinstance(value, (np.generic, np.ndarray)):
        return _describe_array(value)
    for kind, name, text in _PLAIN:
        if isinstance(value, kind):
            return {"type": name or f"torch.{type(value).__name__}", "value": text(value)}
    return _describe_communication(value)


_PLAIN: Final[tuple[tuple[Any, str, Callable[[Any], Any]], ...]] = (
    (torch.Size, "torch.Size", lambda size: [int(n) for n in size]),
    ((torch.dtype, torch.device, torch.memory_format), "", str),
    (slice, "slice", lambda s: [_as_int(x) for x in (s.start, s.stop, s.step)]),
    (type(...), "ellipsis", lambda _: "..."),
    (complex, "complex", str),
)
"""Kinds of objects, each with its name in a dump and the function that describes its value."""


def _describe_array(value: Any) -> dict[str, Any]:
    if isinstance(value, np.generic):
        item = value.item()
        return {"type": type(value).__name__, "value": item if isinstance(item, (bool, int, float, str)) else str(item)}
    facts: dict[str, Any] = {"type": "numpy.ndarray", "dtype": str(value.dtype), "shape": list(value.shape)}
    if value.size and value.dtype.kind in "iuf":
        facts.update(Max=value.max().item(), Min=value.min().item(), Mean=float(value.mean()))
        return {**facts, "Norm": float(np.linalg.norm(value))}
    return {**facts, "Max": None, "Min": None, "Mean": None, "Norm": None}


def _describe_communication(value: Any) -> Any:
    import torch.distributed as dist

    if dist.is_available():
        if isinstance(value, dist.ProcessGroup):
            ranks = _ranks_of(value)
            text = str(ranks).encode()
            return {"type": "torch.ProcessGroup", "group_ranks": ranks, "group_id": hashlib.md5(text).hexdigest()}  # noqa: S324 - a name
        if isinstance(value, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
            return {"type": "torch.distributed.ReduceOp", "value": str(value)}
        if isinstance(value, dist.P2POp):
            kinds = {"class_type": "torch.distributed.P2POp", "op": getattr(value.op, "__name__", str(value.op))}
            return {**kinds, "peer": value.peer, "tag": value.tag}
    return {"type": type(value).__name__, "value": None}


def _ranks_of(group: Any) -> list[int]:
    import torch.distributed as dist

    try:
        return [int(rank) for rank in dist.get_process_group_ranks(group)]
    except (ValueError, RuntimeError, TypeError, KeyError, AttributeError):
        return []


def _as_int(value: Any) -> int | None:
    try:
        return None if value is None else int(value)
    except (TypeError, ValueError):
        return None
