"""Runs calls in a better precision on the CPU: here, or in a process of its own beside an accelerator.

A process of MindSpore has one device. So beside an accelerator the CPU's results come from another process, which
builds the same call anew: what is drawn depends on the seed and the call's name alone.
"""

import multiprocessing
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Protocol

import mindspore as ms
import numpy as np
from mindspore import Tensor

from trainsentry.collectors.calls.both_sides import RAISED, CallResults, SideValue
from trainsentry.collectors.calls.call_check import NotComparableError, UnusableCallError
from trainsentry.collectors.calls.rebuilt_values import TensorSource, arguments_of
from trainsentry.collectors.mindspore.accuracy.call_functions import function_of
from trainsentry.collectors.mindspore.accuracy.call_inputs import InputBuilder
from trainsentry.collectors.mindspore.accuracy.call_run import BuiltCall, Precision, better_precision, run_in_precision
from trainsentry.collectors.mindspore.calls.operations import ATTRIBUTES
from trainsentry.collectors.mindspore.hooks.gradient_hooks import FLOATS
from trainsentry.collectors.mindspore.rows.tensor_statistics import array_of
from trainsentry.collectors.shared.nested import objects_in

Entry = tuple[str, Mapping[str, Any], Mapping[str, Any] | None]
"""A call's name and its entries, forward and backward."""


def built(entry: Entry, source: TensorSource) -> tuple[BuiltCall, Precision]:
    """Return a call with its arguments, and its better precision.

    Raises:
        NotComparableError: for a call whose results say nothing about accuracy.
        UnusableCallError: for a call that cannot be built.

    """
    call, forward, backward = entry
    builder = InputBuilder(call, source)
    attributes = builder.build(forward.get(ATTRIBUTES))
    function = function_of(call, attributes if isinstance(attributes, dict) else None)
    args, kwargs, gradients = arguments_of(builder, forward, backward)
    return BuiltCall(function, args, kwargs, gradients), better_precision(tensors_in([args, kwargs]))


class PreciseRuns(Protocol):
    """Runs calls on the CPU in a better precision."""

    def run(self, entry: Entry, moved: float = 0.0, seed: int = 0) -> CallResults:
        """Return the results of a call as `SideValue`s; see `run_in_precision`.

        Raises:
            Exception: one of RAISED, of the forward pass.

        """


class RunsHere:
    """Runs calls in this process."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self._built: tuple[Entry, tuple[BuiltCall, Precision]] | None = None

    def run(self, entry: Entry, moved: float = 0.0, seed: int = 0) -> CallResults:
        """Return the results of a call; the last call is kept, as it is run several times."""
        if self._built is None or self._built[0] != entry:
            self._built = (entry, built(entry, self._source))
        return sided(run_in_precision(*self._built[1], moved, seed))


class RunsApart:
    """Runs calls in a process of its own, which ends with this object's process at the latest."""

    def __init__(self, source: TensorSource) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, source), daemon=True)
        self._process.start()
        theirs.close()

    def run(self, entry: Entry, moved: float = 0.0, seed: int = 0) -> CallResults:
        """Return the results of a call."""
        self._connection.send((entry, moved, seed))
        try:
            answer = self._connection.recv()
        except EOFError:
            raise RuntimeError("the process that computes on the CPU has died") from None
        if isinstance(answer, BaseException):
            raise answer
        assert isinstance(answer, CallResults)
        return answer

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join(timeout=10)
        self._process.kill()


def _serve(connection: Connection, source: TensorSource) -> None:
    """Answer each request with results or with what was raised, until the other side is gone."""
    ms.set_context(mode=ms.PYNATIVE_MODE, device_target="CPU")
    runs = RunsHere(source)
    with suppress(EOFError, OSError):
        while True:
            entry, moved, seed = connection.recv()
            try:
                answer: Any = runs.run(entry, moved, seed)
            except (NotComparableError, UnusableCallError, *RAISED) as error:
                kind = next(k for k in (NotComparableError, UnusableCallError, *RAISED) if isinstance(error, k))
                answer = kind(str(error))
            connection.send(answer)


def sided(results: CallResults) -> CallResults:
    """Return results with `SideValue`s in place of MindSpore's tensors."""
    outputs = [_side(output) for output in results.outputs]
    gradients = [None if gradient is None else _side(gradient) for gradient in results.gradients]
    return CallResults(outputs, gradients, results.backward_error)


def _side(value: Any) -> SideValue:
    if not isinstance(value, Tensor):
        return SideValue.plain(value)
    array = array_of(value).reshape(-1)
    if array.dtype.kind == "c":
        array = array.astype(np.complex128).view(np.float64)
    floating = value.dtype in FLOATS or array.dtype.kind == "f"
    whole = array.astype(np.float64) if floating else array.copy()
    return SideValue(str(value.dtype), tuple(int(n) for n in value.shape), floating, whole)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of nested arguments, in their order."""
    return [tensor for _, tensor in objects_in(value, Tensor)]
