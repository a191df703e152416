"""A call run on a device and in a better precision: why one of the runs failed, and their results side by side."""

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from trainsentry.collectors.calls.call_check import (
    DeviceRefusedError,
    NotComparableError,
    PairedOutput,
    UnusableCallError,
)

RAISED: Final = (
    ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, NotImplementedError, RuntimeError,
    TypeError, ValueError,
)  # fmt: skip
"""Exceptions that the operations of a framework raise."""

MOVED_RUNS: Final = 4
"""Runs with moved inputs: one may by luck hardly move an element, in a thousand calls surely; four do not."""

_NOTHING: Final = np.zeros(0)

Run = TypeVar("Run")


@dataclass(frozen=True)
class CallResults:
    """Outputs of a run (tensors and plain numbers), and the gradient at each tensor among the arguments, or None."""

    outputs: list[Any]
    gradients: list[Any]
    backward_error: str = ""


@dataclass(frozen=True)
class SideValue:
    """A result of one side; `array` is flat, see `PairedOutput`. A plain value has the shape ()."""

    dtype: str
    shape: tuple[int, ...]
    floating: bool
    array: NDArray[Any] = field(repr=False)

    @classmethod
    def plain(cls, value: Any) -> "SideValue":
        """Return a result that is no tensor."""
        return cls(type(value).__name__, (), isinstance(value, float), np.array([value]))


def first_line(error: BaseException) -> str:
    """Return the kind of an error and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def as_single(value: float) -> float:
    """Return a plain number rounded to float32, as a device rounds it; one that float32 cannot hold stays as it is.

    >>> as_single(0.5), as_single(0.1) == 0.1, as_single(1e300)
    (0.5, False, 1e+300)
    """
    try:
        rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return value
    return rounded if math.isfinite(rounded) and (rounded != 0 or value == 0) else value


def run_both(
    on_device: Callable[[], Run],
    in_precision: Callable[[], Run],
    draws_numbers: Callable[[], bool],
    *,
    target: str,
    real: bool,
) -> tuple[Run, Run]:
    """Return the results in the better precision, whose dtype is `target`, and on the device.

    `draws_numbers` tells after the run on the device whether it has moved the random state; `real`: the inputs are the
    dumped ones.

    Raises:
        NotComparableError, UnusableCallError, DeviceRefusedError: see `collectors.calls.call_check.CallChecks`.

    """
    got, failure = None, ""
    try:
        got = on_device()
    except RAISED as error:
        failure = first_line(error)
    if draws_numbers():
        raise NotComparableError("draws random numbers")
    try:
        expected = in_precision()
    except RAISED as error:
        if got is not None:
            raise NotComparableError(f"does not run in {target}: {first_line(error)}") from None
        if real or isinstance(error, TypeError):
            raise UnusableCallError(f"does not run: {failure}") from None
        raise NotComparableError(f"does not run on random data: {failure}") from None
    if got is None:
        raise DeviceRefusedError(failure)
    return expected, got


def forward_pairs(expected: Sequence[SideValue], got: Sequence[SideValue], judged_as: str = "") -> list[PairedOutput]:
    """Return the outputs of both sides; `judged_as` is the dtype of all, or "" for that of each output."""
    if len(expected) != len(got):
        problem = f"the device returned {len(got)} results, expected {len(expected)}"
        return [PairedOutput(False, 0, " ", " ", " ", (), False, False, _NOTHING, _NOTHING, problem)]
    sides = enumerate(zip(expected, got, strict=True))
    return [_pair(place, one, other, judged_as, backward=False, adds=False) for place, (one, other) in sides]


def backward_pairs(
    expected: Sequence[SideValue | None],
    got: Sequence[SideValue | None],
    outputs: Sequence[SideValue],
    judged_as: str = "",
) -> list[PairedOutput]:
    """Return the gradients of both sides, where both have one; `outputs` are the device's."""
    largest = max((math.prod(side.shape) for side in outputs), default=0)
    return [
        _pair(place, one, other, judged_as, backward=True, adds=math.prod(other.shape) < largest)
        for place, (one, other) in enumerate(zip(expected, got, strict=False))
        if one is not None and other is not None
    ]


def _pair(place: int, one: SideValue, other: SideValue, judged_as: str, *, backward: bool, adds: bool) -> PairedOutput:
    problem = ""
    if one.shape != other.shape:
        problem = f"the device's shape is {other.shape}, expected {one.shape}"
    elif one.floating != other.floating:
        problem = f"the device's dtype is {other.dtype}, expected {one.dtype}"
    return PairedOutput(
        backward,
        place,
        other.dtype,
        one.dtype,
        judged_as or other.dtype,
        other.shape,
        other.floating,
        adds,
        one.array,
        other.array,
        problem,
    )
