"""A dumped call, built anew and run on a device and in the better precision, its results side by side."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainsentry.collectors.calls.both_sides import (
    MOVED_RUNS,
    RAISED,
    CallResults,
    SideValue,
    backward_pairs,
    first_line,
    forward_pairs,
    run_both,
)
from trainsentry.collectors.calls.call_check import NotComparableError, PairedOutput
from trainsentry.collectors.calls.rebuilt_values import TensorSource, arguments_of, split_name
from trainsentry.collectors.series import writable
from trainsentry.collectors.torch.accuracy.call_functions import function_of, is_dropout
from trainsentry.collectors.torch.accuracy.call_inputs import InputBuilder
from trainsentry.collectors.torch.accuracy.call_run import BuiltCall, run_in_precision, run_on_device
from trainsentry.collectors.torch.accuracy.precision import better_precision
from trainsentry.collectors.torch.accuracy.recorded_call import first_places_in, recorded_results
from trainsentry.collectors.torch.device.registry import device_of
from trainsentry.collectors.torch.hooks.nested_tensors import list_tensors
from trainsentry.collectors.torch.saving import SUFFIX, save_tensor

_LOWER: Final = {torch.float16, torch.bfloat16}


class TorchCall:
    """Builds a call and runs it on both sides; see `collectors.calls.call_check.CheckedCall`.

    Without a `device` the device's side is not run: it is what the dump holds, as the training computed it.

    Raises:
        NotComparableError: for a call whose results say nothing about accuracy.
        UnusableCallError: for a call that cannot be built, or that does not run as it was dumped.
        DeviceRefusedError: for a call that only the device refuses.

    """

    def __init__(
        self,
        call: str,
        forward: Mapping[str, Any],
        backward: Mapping[str, Any] | None,
        source: TensorSource,
        device: torch.device | None,
    ) -> None:
        self.operation = split_name(call)[1]
        self.is_dropout = is_dropout(self.operation)
        self._real = source.folder is not None
        builder = InputBuilder(call, source)
        self._call = _build(call, forward, backward, builder)
        tensors = list_tensors([*self._call.args, *self._call.kwargs.values()])
        if device is None:
            self._got = recorded_results(builder, self._call, forward, backward)
            self._precision = better_precision([*tensors, *list_tensors(self._got.outputs)])
            self._expected = self._run_expected()
        else:
            self._precision = better_precision(tensors)
            self._expected, self._got = self._run_both(device)
        self._moved: dict[float, list[CallResults]] = {}
        self.backward_problem = self._expected.backward_error or self._got.backward_error
        self.device_failed_backward = bool(self._got.backward_error) and not self._expected.backward_error
        judged_as = str(self._call.autocast) if self._call.autocast is not None else ""
        outputs = _sides(self._got.outputs)
        self.pairs = forward_pairs(_sides(self._expected.outputs), outputs, judged_as)
        if not self.backward_problem:
            gradients = _gradients(self._expected), _gradients(self._got)
            self.pairs += backward_pairs(*gradients, outputs, judged_as)

    def moved(self, pair: PairedOutput, share: float) -> list[NDArray[np.float64]]:
        """Return an output in the better precision from inputs moved by up to `share` of themselves, several times."""
        if share not in self._moved:
            runs = range(MOVED_RUNS)
            self._moved[share] = [run_in_precision(self._call, self._precision, share, seed) for seed in runs]
        sides = [run.gradients if pair.backward else run.outputs for run in self._moved[share]]
        found = [_side(side[pair.place]).array for side in sides if pair.place < len(side)]
        return [array for array in found if array.size == pair.expected.size]

    def save(self, call: str, folder: Path) -> None:
        """Save inputs and results of both sides, under msprobe's names for them."""
        parts = {
            "forward.input": [*self._call.args, *self._call.kwargs.values()],
            "forward.output.bench": self._expected.outputs,
            "forward.output.device": self._got.outputs,
            "backward.input": self._call.gradients or [],
            "backward.output.bench": self._expected.gradients,
            "backward.output.device": self._got.gradients,
        }
        for part, values in parts.items():
            for place, value in enumerate(values):
                for tensor in list_tensors([value]):
                    save_tensor(tensor.detach(), folder / f"{writable(call)}.{part}.{place}{SUFFIX}")

    def _run_expected(self) -> CallResults:
        """Run the better precision beside recorded results; that random numbers were drawn shows on this side."""
        before = torch.get_rng_state()
        try:
            expected = run_in_precision(self._call, self._precision)
        except RAISED as error:
            raise NotComparableError(f"does not run in {self._precision.target}: {first_line(error)}") from None
        if not self.is_dropout and not torch.equal(before, torch.get_rng_state()):
            raise NotComparableError("draws random numbers")
        if len(expected.outputs) != len(self._got.outputs):
            raise NotComparableError(f"returned {len(expected.outputs)} results, recorded {len(self._got.outputs)}")
        return expected

    def _run_both(self, device: torch.device) -> tuple[CallResults, CallResults]:
        before = _random_states(device)
        return run_both(
            lambda: run_on_device(self._call, device),
            lambda: run_in_precision(self._call, self._precision),
            lambda: not self.is_dropout and _changed(before, _random_states(device)),
            target=str(self._precision.target),
            real=self._real,
        )


def _build(
    call: str, forward: Mapping[str, Any], backward: Mapping[str, Any] | None, builder: InputBuilder
) -> BuiltCall:
    function = function_of(call)
    args, kwargs, gradients = arguments_of(builder, forward, backward)
    operation = split_name(call)[1]
    autocast = _autocast(forward, [*args, *kwargs.values()])
    return BuiltCall(function, operation, args, kwargs, gradients, autocast, first_places_in(forward))


def _autocast(forward: Mapping[str, Any], inputs: list[Any]) -> torch.dtype | None:
    """Return the half type that a call of float32 inputs returned: it ran under autocast."""
    output = forward.get("output")
    first = output[0] if isinstance(output, list) and output else None
    name = str(first.get("dtype", "")) if isinstance(first, Mapping) else ""
    dtype = getattr(torch, name.removeprefix("torch."), None)
    asked = any(isinstance(value, torch.dtype) for value in inputs)
    dtypes = {t.dtype for t in list_tensors(inputs) if t.is_floating_point()}
    return dtype if dtype in _LOWER and torch.float32 in dtypes and not asked else None


def _sides(outputs: Sequence[Any]) -> list[SideValue]:
    return [_side(output) for output in outputs]


def _gradients(results: CallResults) -> list[SideValue | None]:
    return [None if gradient is None else _side(gradient) for gradient in results.gradients]


def _side(value: Any) -> SideValue:
    if not isinstance(value, Tensor):
        return SideValue.plain(value)
    floating = value.is_floating_point() or value.is_complex()
    return SideValue(str(value.dtype), tuple(value.shape), floating, _flat_array(value))


def _flat_array(value: Tensor) -> NDArray[Any]:
    plain = value.detach().cpu()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    if plain.is_complex():
        plain = torch.view_as_real(plain.to(torch.complex128).resolve_conj().contiguous())
    elif plain.is_floating_point():
        plain = plain.double()
    array: NDArray[Any] = plain.resolve_neg().contiguous().reshape(-1).numpy()
    return array


def _random_states(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *device_of(device).rng_states()]


def _changed(before: list[Tensor], after: list[Tensor]) -> bool:
    return any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
