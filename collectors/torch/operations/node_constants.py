"""Reads the constants of autograd's nodes: numbers, names, and sums of masks and small tables in host memory."""

import ctypes
import math
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainsentry.collectors.torch.rows.local_tensor import is_readable

MOST_MASKED: Final = 1 << 20
"""Elements of a mask that are counted, some 30 µs; a larger mask has no count."""

MOST_SUMMED: Final = 1 << 16
"""Elements of a constant table that are summed by their places too, some 100 µs."""

GOLDEN: Final = (math.sqrt(5) - 1) / 2
"""The golden ratio, whose multiples have fractions that are spread evenly and never the same."""

ANOTHER_ORDER: Final = "the same in another order"
"""How a table is told of whose elements have changed places."""

OTHER: Final = "other"
FACTORS: Final = frozenset({"MulBackward0", "DivBackward0"})
"""Nodes that save as `other` by what a program multiplies or divides: a number, or a table as of rotary positions."""

MASKS: Final = frozenset({"_saved_mask", "_saved_condition", "_saved_attn_mask", "_saved_attn_bias"})
"""What nodes save of masks, of bools or not."""

PLACES: Final = frozenset({"EmbeddingBackward0", "IndexSelectBackward0", "GatherBackward0", "IndexBackward0"})
"""Nodes that save, as `indices` or `index`, which rows were taken: positions are the same in each pass."""

TABLES: Final = frozenset({OTHER, "indices", "index", *(name.removeprefix("_saved_") for name in MASKS)})
"""Constants that may be tables and masks, of which a few batches may have others."""

LEAST_OF_TABLE: Final = 2
"""Numbers that stand for a table, beside its shape: its sum, and the one by places."""

READ: Final = {
    torch.bool: np.bool_,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float32: np.float32,
    torch.float64: np.float64,
}
"""Dtypes of numbers, masks and tables that are read."""

TELLS_HOOKS: Final = hasattr(torch._C._autograd.SavedTensor, "unpack_hook")
"""Whether this torch tells which saved tensors have hooks; where it does not, none is looked at."""

LARGE: Final = 1 << 63
"""A number from which on nodes are leaves, and numbers of 64 bits without a sign are negative."""

_ABSENT: Final = object()

Argument = None | bool | int | float | str | tuple[Any, ...]


Reader = tuple[str, str, bool]
"""A constant's name, the attribute of the node that has it, and whether that holds a tensor."""


def arguments_of(node: Any, readers: list[Reader], sources: Any) -> tuple[tuple[str, Argument], ...]:
    """Return the constants of a node by name, without unpacking what hooks of saved tensors hold."""
    found = []
    for key, attribute, is_tensor in readers:
        if key == OTHER and is_tensor and sources[-1][0] is not None:
            continue  # it needs a gradient: no constant
        value = _of_saved(getattr(node, attribute)) if is_tensor else _plain(getattr(node, attribute))
        if value is not _ABSENT:
            found.append((key, value))
    return tuple(found)


def is_plain(value: Any) -> bool:
    """Whether a constant is a number, a name, or nested tuples of them, which can be compared as they are."""
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    return _plain(value) is not _ABSENT


def readers_of(kind: type) -> list[Reader]:
    """Return the constants that nodes of a kind save: their name, their attribute, and whether it holds a tensor."""
    attributes = dir(kind)
    found = []
    for attribute in attributes:
        raw = f"_raw{attribute}"
        if not attribute.startswith("_saved_") or "_sym_" in attribute:
            continue
        if raw not in attributes:
            found.append((attribute.removeprefix("_saved_"), attribute, False))
            continue
        is_factor = kind.__name__ in FACTORS and attribute == f"_saved_{OTHER}"
        is_place = kind.__name__ in PLACES and attribute in {"_saved_indices", "_saved_index"}
        if TELLS_HOOKS and (attribute in MASKS or is_factor or is_place):
            found.append((attribute.removeprefix("_saved_"), raw, True))
    return found


def _of_saved(saved: Any) -> Any:
    """Return what a saved tensor holds; of several, as one for each axis, all, None for an axis without one."""
    if not isinstance(saved, tuple):
        return _of_tensor(saved)
    each = tuple(None if one.unpack_hook is None and one.data is None else _of_tensor(one) for one in saved)
    return _ABSENT if _ABSENT in each else each


def _of_tensor(saved: Any) -> Any:
    """Return the number that a saved tensor without axes holds, or the shape and sums of another.

    Only what is in host memory is read. Hooks of saved tensors (checkpoints, offloading) may compute when a tensor is
    unpacked: what they hold is left out.
    """
    if saved.unpack_hook is not None:
        return _ABSENT
    tensor = saved.data
    if type(tensor) is not Tensor or not tensor.is_cpu or tensor.layout is not torch.strided:
        return _ABSENT
    if tensor.dtype not in READ or tensor.is_neg() or not is_readable(tensor):
        return _ABSENT
    if not 0 < tensor.numel() <= (MOST_MASKED if tensor.dtype is torch.bool else MOST_SUMMED):
        return _ABSENT
    return _plain(_array_of(tensor).item()) if tensor.ndim == 0 else _summed(_array_of(tensor))


def _summed(values: npt.NDArray[Any]) -> tuple[Any, ...]:
    """Return the shape and the sum of a table, and one that is another where elements change places.

    Of floats also how many are finite, as a mask to be added holds -Inf. A large mask is only counted; 0 follows.
    """
    if values.dtype.kind == "f":
        finite = np.isfinite(values)
        kept = values.astype(np.float64)
        kept[~finite] = 0.0
        kept = kept.ravel()
        by_place = (kept * _weights()[: len(kept)]).sum()  # a product of vectors would wake the threads of BLAS
        sums = (float(f"{float(total):.6g}") for total in (kept.sum(), by_place))
        return (*values.shape, int(finite.sum()), *sums)
    total = int(values.sum(dtype=np.int64))
    if values.size > MOST_SUMMED:
        return (*values.shape, total, 0)
    flat = values.ravel().astype(np.int64)
    return (*values.shape, total, int((flat * _places()[: len(flat)]).sum()))


@lru_cache(maxsize=1)
def _weights() -> npt.NDArray[np.float64]:
    """Return `MOST_SUMMED` numbers from 1 to 2, each another."""
    fractions: npt.NDArray[np.float64] = np.modf(np.arange(MOST_SUMMED) * GOLDEN)[0]
    return 1.0 + fractions


@lru_cache(maxsize=1)
def _places() -> npt.NDArray[np.int64]:
    return np.arange(1, MOST_SUMMED + 1)


def _array_of(tensor: Tensor) -> npt.NDArray[Any]:
    """Return a tensor's memory as an array, by no operation that a profiler or a dispatch mode would see."""
    size = tensor.element_size()
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = memoryview((ctypes.c_char * ((last + 1) * size)).from_address(tensor.data_ptr()))
    strides = [stride * size for stride in tensor.stride()]
    found: npt.NDArray[Any] = np.ndarray(tuple(tensor.shape), READ[tensor.dtype], memory, strides=strides)
    return found


def _plain(value: Any) -> Any:
    """Return a constant as something that equals itself: no NaN, and negative numbers as such."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, int):
        return value - 2 * LARGE if value >= LARGE else value
    if isinstance(value, float):
        return "nan" if math.isnan(value) else value
    if isinstance(value, tuple):
        return tuple(_plain(x) for x in value)
    return _ABSENT


def change_shown(key: str, was: Argument, now: Argument) -> str:
    """Return a constant and another one in words.

    >>> change_shown("approximate", "none", "tanh"), change_shown("indices", (8, 28, 168), (8, 28, 172))
    ('none → tanh', 'a table with the sum 28 → the same in another order')
    """
    before, after = (_shown(key, value) for value in (was, now))
    if before == after:
        before, after = (_shown(key, was), ANOTHER_ORDER) if is_reordered(key, was, now) else (repr(was), repr(now))
    return f"{before} → {after}"


def is_reordered(key: str, was: Argument, now: Argument) -> bool:
    """Whether two different constants are tables of one shape and sum."""
    if key not in TABLES or not (isinstance(was, tuple) and isinstance(now, tuple)) or len(was) != len(now):
        return False
    pairs = list(zip(was, now, strict=True))
    if any(isinstance(one, tuple) for one in was):
        return all(one == other or is_reordered(key, one, other) for one, other in pairs)
    return len(was) > LEAST_OF_TABLE and was[:-1] == now[:-1]


def _shown(key: str, value: Argument) -> str:
    if isinstance(value, tuple) and key in TABLES and _holds_tables(value):
        tables = [table for table in value if isinstance(table, tuple)] or [value]
        return " and ".join(_shown_table(f"_saved_{key}" in MASKS, table) for table in tables)
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)


def _holds_tables(value: tuple[Any, ...]) -> bool:
    """Whether a constant is a table, or one for each axis: an index may be a single number."""
    nested = [part for part in value if isinstance(part, tuple)]
    return bool(nested) or len(value) > LEAST_OF_TABLE


def _shown_table(is_mask: bool, value: tuple[Any, ...]) -> str:
    *shape, total, _ = value
    if is_mask and isinstance(total, int):
        return f"{total} of {math.prod(shape)} elements"
    text = f"a table with the sum {total:.6g}"
    if isinstance(total, float) and shape[-1] != math.prod(shape[:-1]):
        return f"{text} of {shape[-1]} finite elements"
    return text
