"""A dumped call, built anew and run on a device and in the better precision, its results side by side."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainsentry.collectors.calls.call_check import (
    DeviceRefusedError,
    NotComparableError,
    PairedOutput,
    UnusableCallError,
)
from trainsentry.collectors.series import writable
from trainsentry.collectors.torch.accuracy.call_functions import function_of, is_dropout, split_name
from trainsentry.collectors.torch.accuracy.call_inputs import InputBuilder, TensorSource
from trainsentry.collectors.torch.accuracy.call_run import (
    RAISED,
    BuiltCall,
    Results,
    first_line,
    run_in_precision,
    run_on_device,
)
from trainsentry.collectors.torch.accuracy.precision import better_precision
from trainsentry.collectors.torch.accuracy.recorded_call import first_places_in, recorded_results
from trainsentry.collectors.torch.device.registry import device_of
from trainsentry.collectors.torch.hooks.nested_tensors import list_tensors
from trainsentry.collectors.torch.saving import SUFFIX, save_tensor

MOVED_RUNS: Final = 4
"""Runs with moved inputs: one may by luck hardly move an element, in a thousand calls surely; four do not."""

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
        self._moved: dict[float, list[Results]] = {}
        self.backward_problem = self._expected.backward_error or self._got.backward_error
        self.device_failed_backward = bool(self._got.backward_error) and not self._expected.backward_error
        self.pairs = _forward_pairs(self._call, self._expected, self._got)
        if not self.backward_problem:
            self.pairs += _backward_pairs(self._call, self._expected, self._got)

    def moved(self, pair: PairedOutput, share: float) -> list[NDArray[np.float64]]:
        """Return an output in the better precision from inputs moved by up to `share` of themselves, several times."""
        if share not in self._moved:
            runs = range(MOVED_RUNS)
            self._moved[share] = [run_in_precision(self._call, self._precision, share, seed) for seed in runs]
        sides = [run.gradients if pair.backward else run.outputs for run in self._moved[share]]
        found = [_flat_array(side[pair.place]) for side in sides if pair.place < len(side)]
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

    def _run_expected(self) -> Results:
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

    def _run_both(self, device: torch.device) -> tuple[Results, Results]:
        before = _random_states(device)
        got, failure = None, ""
        try:
            got = run_on_device(self._call, device)
        except RAISED as error:
            failure = first_line(error)
        if not self.is_dropout and _changed(before, _random_states(device)):
            raise NotComparableError("draws random numbers")
        try:
            expected = run_in_precision(self._call, self._precision)
        except RAISED as error:
            if got is not None:
                raise NotComparableError(f"does not run in {self._precision.target}: {first_line(error)}") from None
            if self._real or isinstance(error, TypeError):
                raise UnusableCallError(f"does not run: {failure}") from None
            raise NotComparableError(f"does not run on random data: {failure}") from None
        if got is None:
            raise DeviceRefusedError(failure)
        return expected, got


def _build(
    call: str, forward: Mapping[str, Any], backward: Mapping[str, Any] | None, builder: InputBuilder
) -> BuiltCall:
    function = function_of(call)
    args = builder.build(forward.get("input_args", forward.get("args", [])))
    kwargs = builder.build(forward.get("input_kwargs", forward.get("kwargs", {})))
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise UnusableCallError("its entry holds no list of arguments")
    gradients = builder.build(backward.get("input", [])) if backward is not None and "out" not in kwargs else None
    if gradients is not None and not isinstance(gradients, list):
        raise UnusableCallError("its entry holds no list of gradients")
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


def _forward_pairs(call: BuiltCall, expected: Results, got: Results) -> list[PairedOutput]:
    if len(expected.outputs) != len(got.outputs):
        problem = f"the device returned {len(got.outputs)} results, expected {len(expected.outputs)}"
        return [_problem(problem)]
    sides = enumerate(zip(expected.outputs, got.outputs, strict=True))
    return [_pair(call, place, one, other, backward=False, adds=False) for place, (one, other) in sides]


def _backward_pairs(call: BuiltCall, expected: Results, got: Results) -> list[PairedOutput]:
    largest = max((t.numel() for t in got.outputs if isinstance(t, Tensor)), default=0)
    found = []
    for place, (one, other) in enumerate(zip(expected.gradients, got.gradients, strict=False)):
        if one is not None and other is not None:
            adds = other.numel() < largest
            found.append(_pair(call, place, one, other, backward=True, adds=adds))
    return found


def _pair(call: BuiltCall, place: int, one: Any, other: Any, *, backward: bool, adds: bool) -> PairedOutput:
    expected, got = _flat_array(one), _flat_array(other)
    names = [str(side.dtype) if isinstance(side, Tensor) else type(side).__name__ for side in (one, other)]
    shapes = [tuple(side.shape) if isinstance(side, Tensor) else () for side in (one, other)]
    kinds = [_is_floating(side) for side in (one, other)]
    problem = ""
    if shapes[0] != shapes[1]:
        problem = f"the device's shape is {shapes[1]}, expected {shapes[0]}"
    elif kinds[0] != kinds[1]:
        problem = f"the device's dtype is {names[1]}, expected {names[0]}"
    judged = str(call.autocast) if call.autocast is not None else names[1]
    return PairedOutput(backward, place, names[1], names[0], judged, shapes[1], kinds[1], adds, expected, got, problem)


def _problem(problem: str) -> PairedOutput:
    nothing = np.zeros(0)
    return PairedOutput(False, 0, " ", " ", " ", (), False, False, nothing, nothing, problem)


def _is_floating(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_floating_point() or value.is_complex()
    return isinstance(value, float)


def _flat_array(value: Any) -> NDArray[Any]:
    if not isinstance(value, Tensor):
        return np.array([value])
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
