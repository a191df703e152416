"""Changes the arguments of a call a little; a change that rounding would undo is made by one unit in the last place.

The changes are those of `collectors.torch.calls.free_benchmark.perturbations`, in NumPy: MindSpore has no kernel that
reads a number as an integer. bfloat16, which NumPy lacks, is kept as the upper half of float32.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import mindspore as ms
import numpy as np
from mindspore import Tensor
from numpy.typing import NDArray

from trainsentry.collectors.calls.benchmark_task import plain_dtype
from trainsentry.collectors.calls.free_benchmark import IMPROVE_PRECISION, NO_CHANGE, NOISE, TO_CPU
from trainsentry.collectors.mindspore.rows.tensor_statistics import array_of
from trainsentry.collectors.shared.nested import mapped

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Array = NDArray[Any]

_BITS: Final = {2: np.int16, 4: np.int32, 8: np.int64}
"""Integers by their bytes: the next one in size is the next number."""

_LARGEST: Final = {"bfloat16": 0x7F7F, "float16": 0x7BFF, "float32": 0x7F7FFFFF, "float64": 0x7FEFFFFFFFFFFFFF}
_TINY: Final = {"bfloat16": 2.0**-126, "float16": 2.0**-14, "float32": 2.0**-126, "float64": 2.0**-1022}
"""The largest finite number of each dtype as bits, and the smallest normal one."""

HALVES: Final = frozenset({ms.float16, ms.bfloat16})


def perturbed(mode: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments | None:
    """Return the arguments of a call after a perturbation; None when it changes nothing.

    For `to_cpu` only the precision changes: the task is refused where the CPU is not the device.
    """
    if mode == NO_CHANGE:
        return args, dict(kwargs)
    done: list[bool] = []

    def change(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if mode in {IMPROVE_PRECISION, TO_CPU}:
            done.append(value.dtype in HALVES)
            return value.astype(ms.float32) if done[-1] else value
        if any(done) or plain_dtype(str(value.dtype)) not in NOISE or not value.size:
            return value
        bits = bits_of(value)
        changed = _CHANGES[mode](bits, array_of(value).reshape(-1), plain_dtype(str(value.dtype)))
        done.append(not np.array_equal(bits, changed))
        return of_bits(changed, value) if done[-1] else value

    changed = mapped(args, change), mapped(dict(kwargs), change)
    return changed if any(done) or mode == TO_CPU else None


def bits_of(tensor: Tensor) -> Array:
    """Return the numbers of a tensor as integers of the same width, flat."""
    array = np.ascontiguousarray(tensor.asnumpy()).reshape(-1)
    return array.view(_BITS[array.dtype.itemsize])


def of_bits(bits: Array, like: Tensor) -> Tensor:
    """Return a new tensor of the dtype and shape of `like`, from what `bits_of` returns."""
    shape = [int(n) for n in like.shape]
    if like.dtype == ms.bfloat16:
        wide = (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return Tensor(wide.reshape(shape)).astype(ms.bfloat16)
    return Tensor(bits.view(ms.dtype_to_nptype(like.dtype)).reshape(shape).copy())


def _with_noise(bits: Array, values: Array, dtype: str) -> Array:
    """Add the noise of the dtype; an element that swallows it moves to its neighbour instead."""
    noise = NOISE[dtype]
    with np.errstate(over="ignore", invalid="ignore"):
        large = (np.abs(values) > math.sqrt(noise)) & np.isfinite(values)
        changed = np.where(large, _rounded(values + values.dtype.type(noise), dtype), bits)
    largest = (bits & _LARGEST[dtype]) == _LARGEST[dtype]  # its neighbour outwards is Inf
    neighbour = np.where(largest, bits - 1, bits + 1)
    found: Array = np.where(large & (changed == bits), neighbour, changed).astype(bits.dtype)
    return found


def _rounded(values: Array, dtype: str) -> Array:
    """Return numbers as bits of their dtype; those of bfloat16 come as float32."""
    if dtype != "bfloat16":
        return values.view(_BITS[values.dtype.itemsize])
    wide = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16).view(np.int16)


def _with_other_bits(bits: Array, values: Array, dtype: str) -> Array:
    """Flip the last bit of each normal number."""
    normal = (np.abs(values) > _TINY[dtype]) & np.isfinite(values)
    found: Array = np.where(normal, bits ^ 1, bits).astype(bits.dtype)
    return found


def _with_ends_exchanged(bits: Array, values: Array, dtype: str) -> Array:
    """Exchange the first element and the last."""
    del values, dtype
    changed: Array = bits.copy()
    changed[0], changed[-1] = bits[-1], bits[0]
    return changed


_CHANGES: Final[dict[str, Callable[[Array, Array, str], Array]]] = {
    "add_noise": _with_noise,
    "bit_noise": _with_other_bits,
    "change_value": _with_ends_exchanged,
}
