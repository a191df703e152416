"""A dumped call, built anew and run on a device and in the better precision, its results side by side."""

import math
from pathlib import Path
from typing import Final

import mindspore as ms
import numpy as np
from numpy.typing import NDArray

from trainsentry.collectors.calls.both_sides import (
    MOVED_RUNS,
    CallResults,
    SideValue,
    backward_pairs,
    forward_pairs,
    run_both,
)
from trainsentry.collectors.calls.call_check import NotComparableError, PairedOutput
from trainsentry.collectors.calls.rebuilt_values import TensorSource, split_name
from trainsentry.collectors.mindspore.accuracy.call_functions import is_dropout
from trainsentry.collectors.mindspore.accuracy.call_run import lacks_kernel, run_on_device
from trainsentry.collectors.mindspore.accuracy.precise_runs import Entry, PreciseRuns, built, sided, tensors_in
from trainsentry.collectors.mindspore.saving import SUFFIX, save_array, save_tensor
from trainsentry.collectors.series import writable

ONLY_SINGLE: Final = "float64 is computed in float32 by this MindSpore"
"""Several kernels of the CPU (2.10: LogSoftmax, Softplus, AvgPool) take float64 and compute in float32."""

_SHIFT: Final = 2.0**-22
"""Share by which inputs are moved to see in what precision a kernel computes: more than float32 rounds away."""


class MindSporeCall:
    """Builds a call and runs it on both sides; see `collectors.calls.call_check.CheckedCall`.

    Raises:
        NotComparableError: for a call whose results say nothing about accuracy.
        UnusableCallError: for a call that cannot be built, or that does not run as it was dumped.
        DeviceRefusedError: for a call that only the device refuses.

    """

    def __init__(self, entry: Entry, source: TensorSource, precise: PreciseRuns) -> None:
        self.operation = split_name(entry[0])[1]
        self.is_dropout = is_dropout(self.operation)
        self._entry = entry
        self._precise = precise
        self._call, self._precision = built(entry, source)
        self._expected, self._got = self._run_both(real=source.folder is not None)
        self._moved: dict[float, list[CallResults]] = {}
        self.backward_problem = self._expected.backward_error or self._got.backward_error
        only_device = bool(self._got.backward_error) and not self._expected.backward_error
        self.device_failed_backward = only_device and not lacks_kernel(self._got.backward_error)
        if not self.is_dropout:
            self._check_precision()
        self.pairs = forward_pairs(self._expected.outputs, self._got.outputs)
        if not self.backward_problem:
            self.pairs += backward_pairs(self._expected.gradients, self._got.gradients, self._got.outputs)

    def moved(self, pair: PairedOutput, share: float) -> list[NDArray[np.float64]]:
        """Return an output in the better precision from inputs moved by up to `share` of themselves, several times."""
        if share not in self._moved:
            self._moved[share] = [self._precise.run(self._entry, share, seed) for seed in range(MOVED_RUNS)]
        sides = [run.gradients if pair.backward else run.outputs for run in self._moved[share]]
        found = [side[pair.place].array for side in sides if pair.place < len(side) and side[pair.place] is not None]
        return [array for array in found if array.size == pair.expected.size]

    def save(self, call: str, folder: Path) -> None:
        """Save inputs and results of both sides, under msprobe's names for them."""
        given = {
            "forward.input": [*self._call.args, *self._call.kwargs.values()],
            "backward.input": self._call.gradients or [],
        }
        results = {
            "forward.output.bench": self._expected.outputs,
            "forward.output.device": self._got.outputs,
            "backward.output.bench": self._expected.gradients,
            "backward.output.device": self._got.gradients,
        }
        for part, values in given.items():
            for place, value in enumerate(values):
                for tensor in tensors_in(value):
                    save_tensor(tensor, folder / f"{writable(call)}.{part}.{place}{SUFFIX}")
        for part, sides in results.items():
            for place, side in enumerate(sides):
                if side is not None:
                    whole = side.array.size == math.prod(side.shape)  # a complex element is two numbers
                    array = side.array.reshape(side.shape) if whole else side.array
                    save_array(array, folder / f"{writable(call)}.{part}.{place}{SUFFIX}")

    def _run_both(self, *, real: bool) -> tuple[CallResults, CallResults]:
        before = ms.get_rng_state().asnumpy().copy()
        return run_both(
            lambda: sided(run_on_device(self._call)),
            lambda: self._precise.run(self._entry),
            lambda: not self.is_dropout and not np.array_equal(before, ms.get_rng_state().asnumpy()),
            target=str(self._precision.target).lower(),
            real=real,
        )

    def _check_precision(self) -> None:
        """Compare only what a kernel really computes in float64, told from inputs that float32 cannot hold.

        Raises:
            NotComparableError: when the forward pass is computed in float32.

        """
        if self._precision.target != ms.float64 or not self._precision.single:
            return
        moved = self._precise.run(self._entry, _SHIFT)
        if any(map(_is_single, self._expected.outputs, moved.outputs)):
            raise NotComparableError(ONLY_SINGLE)
        gradients = zip(self._expected.gradients, moved.gradients, strict=False)
        if any(a is not None and b is not None and _is_single(a, b) for a, b in gradients):
            self.backward_problem, self.device_failed_backward = ONLY_SINGLE, False


def _is_single(before: SideValue, moved: SideValue) -> bool:
    """Whether a result that follows its inputs holds nothing but numbers of float32."""
    if moved.dtype != str(ms.float64) or np.array_equal(before.array, moved.array, equal_nan=True):
        return False
    found = moved.array[np.isfinite(moved.array)]
    with np.errstate(over="ignore"):
        held = found == found.astype(np.float32)
    return bool(found.size and held.all() and (found != np.round(found)).any())
