"""A call of a dump that was built anew and run twice: what its two sides returned, or why it was not run."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

RECORDED: Final = "recorded"
"""In place of a device: the results are those that the training recorded."""


class NotComparableError(Exception):
    """A call whose results say nothing about accuracy: random, a view, a collective, uninitialised memory."""


class UnusableCallError(Exception):
    """A call that cannot be built: its function is gone, its tensors are missing, or its entry is damaged."""


class DeviceRefusedError(Exception):
    """A call that the device refuses while it runs in the better precision."""


@dataclass(frozen=True)
class PairedOutput:
    """An output of a call, or the gradient at one of its arguments, on both sides.

    `expected` and `got` are flat: float64 for floating-point tensors (a complex element as two numbers), the dtype's
    own for others; a plain number is an array of one. `dtype` and `expected_dtype` are as the tensors have them,
    `judged_as` is the dtype whose precision can be asked for. `adds`: a gradient with fewer elements than the
    output. `problem` says why the two sides cannot be compared.
    """

    backward: bool
    place: int
    dtype: str
    expected_dtype: str
    judged_as: str
    shape: tuple[int, ...]
    floating: bool
    adds: bool
    expected: NDArray[Any]
    got: NDArray[Any]
    problem: str = ""


class CheckedCall(Protocol):
    """A call after both runs.

    `pairs` are its outputs, forward and then backward; `backward_problem` says why the dumped backward pass was not
    run, and is empty where it was or where there is none; `device_failed_backward`: only the device failed.
    """

    operation: str
    is_dropout: bool
    pairs: list[PairedOutput]
    backward_problem: str
    device_failed_backward: bool

    def moved(self, pair: PairedOutput, share: float) -> list[NDArray[np.float64]]:
        """Return an output in the better precision from inputs moved by up to `share` of themselves, several times."""

    def save(self, call: str, folder: Path) -> None:
        """Save inputs and results of both sides."""


class CallChecks(Protocol):
    """Runs the calls of a dump in a framework."""

    def check(self, call: str, forward: Mapping[str, Any], backward: Mapping[str, Any] | None) -> CheckedCall:
        """Run a call on both sides.

        Raises:
            NotComparableError: for a call whose results say nothing about accuracy.
            UnusableCallError: for a call that cannot be built, or that does not run as it was dumped.
            DeviceRefusedError: for a call that only the device refuses.

        """
