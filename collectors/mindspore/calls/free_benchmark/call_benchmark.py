"""The debugger's watcher for free_benchmark: makes each call again, perturbed, and compares or passes on results."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

from mindspore import Tensor
from mindspore.common.api import _pynative_executor as _executor

from trainsentry.collectors.calls.benchmark_task import NOT_PERTURBED, REFUSED, BenchmarkTask, LeftOutError
from trainsentry.collectors.calls.call import Call
from trainsentry.collectors.calls.call_selection import CallSelection
from trainsentry.collectors.calls.free_benchmark import (
    IMPROVE_PRECISION,
    PART,
    TO_CPU,
    BenchmarkSettings,
    ResultDifference,
)
from trainsentry.collectors.guard import Guard
from trainsentry.collectors.mindspore.calls.free_benchmark.again import (
    OriginalCall,
    backward_again,
    changes_buffers,
    draws_in_place,
    forward_again,
    remember,
    tensors_in,
)
from trainsentry.collectors.mindspore.calls.free_benchmark.comparison import agrees_with_cpu, difference, pairs
from trainsentry.collectors.mindspore.calls.free_benchmark.perturbations import perturbed
from trainsentry.collectors.mindspore.calls.operations import Operations, changes_in_place
from trainsentry.collectors.mindspore.hooks.function_patches import patch, unpatch
from trainsentry.collectors.mindspore.hooks.gradient_hooks import FLOATS, Arrived, hooked, hooked_call
from trainsentry.collectors.mindspore.runtime import in_graph_mode, records_gradients, wait
from trainsentry.collectors.shared.nested import mapped

logger = logging.getLogger("trainsentry")

_COLLECTIVES: Final = ("Distributed.", "MintDistributed.")
_COMPILED: Final = "Jit."
_WHOLE: Final = frozenset({IMPROVE_PRECISION, TO_CPU})
"""Modes that change the arguments of a backward pass too; noise is put on the gradients that arrive."""


class CallBenchmark(BenchmarkTask):
    """Benchmarks the calls of operations between `start` and `stop`; task and watcher of the debugger in one.

    In `check` mode the training gets the original results, and a row of the table tells each that is inconsistent. A
    call of a forward pass that MindSpore records is made again once its backward pass is over, because a refused
    operation would end the recording; its arguments and results are held until then. In `fix` mode the training gets
    the results of the perturbed call, in the original dtypes, once that call has been seen to run while nothing was
    recorded. A call that cannot be made again is counted in `left_out` by reason, and is never an error.
    """

    after_call: Callable[[], None] | None = None
    writer: Any = None

    def __init__(self, guard: Guard, settings: BenchmarkSettings, selection: CallSelection) -> None:
        super().__init__(settings)
        self.guard = guard
        self.selection = selection
        self.running = False
        self._counts: Counter[str] = Counter()
        self._operations = Operations(self.call_operation)
        self._inside = False
        self._recorded = False
        self._waiting: list[OriginalCall] = []
        self._tried: dict[str, bool] = {}
        self._follows_grad = False

    # ------------------------------------------------------------------ called by the debugger's session

    def start(self, modules: Sequence[Any], *, window: bool = False) -> None:
        """Start watching operations; modules play no part."""
        del modules, window
        if self.running:
            return
        self.running = True
        if not self._follows_grad:
            self._follows_grad = True
            patch(type(_executor), "grad", self._after_grad)
        self._operations.start()

    def stop(self) -> None:
        """Stop watching; calls whose backward pass is to come are checked after it, until `reset`."""
        self._operations.stop()
        self.running = False
        if not self._records():
            self.guard.run(PART, self._check_waiting)

    def reset(self) -> None:
        """End the step."""
        if self._waiting:
            self.left_out["whose backward pass has not come"] += len(self._waiting)
            self._waiting.clear()
        if self._follows_grad:
            self._follows_grad = False
            unpatch(type(_executor), "grad", self._after_grad)
        if self._counts:
            logger.info("trainsentry: free_benchmark: step %d: %s", self.iteration, self.summary())
        self._counts.clear()
        self._recorded = False
        self.selection.reset()

    # ------------------------------------------------------------------ called at each call

    def call_operation(
        self, stem: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call an operation; return its result, or in `fix` mode that of the perturbed call."""
        if not self.running or self._inside or in_graph_mode():
            return function(*args, **kwargs)
        self._inside = True
        try:
            original = self.guard.run(PART, self._begin, stem, function, args, kwargs)
            if original is not None and self.settings.stage == "backward":
                hooked_arguments = self.guard.run(PART, hooked_call, args, kwargs, self._arrived(original, "input"))
                args, kwargs = hooked_arguments if hooked_arguments is not None else (args, kwargs)
            output = function(*args, **kwargs)
            if original is None:
                return output
            given = self.guard.run(PART, self._end, original, output)
            return output if given is None else given
        finally:
            self._inside = False

    def _begin(
        self, stem: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> OriginalCall | None:
        wait()
        tensors = tensors_in((args, kwargs))
        if not tensors:
            return None
        call = Call(stem, self._counts[stem], is_module=False)
        self._counts[stem] += 1
        self._recorded = self._recorded or _executor.grad_flag()
        if not self._is_chosen(call) or not any(t.dtype in FLOATS for t in tensors):
            return None
        reason = self._reason_against(stem)
        if reason:
            self.left_out[reason] += 1
            return None
        return remember(call, function, args, kwargs, writes=_writes(stem))

    def _is_chosen(self, call: Call) -> bool:
        if self.settings.stage == "forward":
            chosen = self.selection.begins(call, "forward")
            self.selection.ends(call, "forward")
            return chosen
        return records_gradients() and self.selection.may_begin(call, "backward")

    def _reason_against(self, stem: str) -> str:
        """Return why no call of an operation is made again, or nothing."""
        if stem.startswith(_COLLECTIVES):
            return "collectives"
        if stem.startswith(_COMPILED):
            return "that run compiled functions"
        if draws_in_place(stem):
            return "that draw random numbers"
        if _writes(stem) and (self.settings.fixes or self.settings.stage == "backward"):
            return "that change their arguments"
        return ""

    def _end(self, original: OriginalCall, output: Any) -> Any:
        """Keep a call that has been made, or check it at once; return the result to pass on, None for the original."""
        wait()
        original.returned(output)
        if self.settings.fixes:
            return self._fixed(original)
        self._waiting.append(original)
        if self.settings.stage == "backward":
            return hooked(output, self._arrived(original, "output"))
        if not self._records():
            self._check_waiting()
        return None

    def _arrived(self, original: OriginalCall, group: str) -> Arrived:
        def arrived(path: str, gradient: Tensor) -> None:
            self.guard.run(PART, original.take_gradient, group, path, gradient)

        return arrived

    # ------------------------------------------------------------------ once nothing is recorded

    def _records(self) -> bool:
        """Whether MindSpore records a forward pass, or waits for the backward pass of one."""
        return self._recorded or bool(_executor.grad_flag())

    def _after_grad(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the executor's `grad`, which runs a whole backward pass."""

        def grad(*args: Any, **kwargs: Any) -> Any:
            try:
                found = function(*args, **kwargs)
            except BaseException:
                self._waiting.clear()
                self._recorded = False
                raise
            if not _executor.grad_flag() and not self._inside:
                self._recorded = False
                self.guard.run(PART, self._check_waiting)
            return found

        return grad

    def _check_waiting(self) -> None:
        """Make the calls again that are waiting for it, one after the other."""
        waiting, self._waiting = self._waiting, []
        was_inside, self._inside = self._inside, True
        try:
            wait()
            for original in waiting:
                self._check_one(original)
        finally:
            self._inside = was_inside

    def _check_one(self, original: OriginalCall) -> None:
        try:
            if self.settings.fixes:
                self._try(original)
            elif self.settings.stage == "backward":
                self._check_backward(original)
            else:
                original.check_intact(outputs=True)
                self.check(original.call, original.results, lambda mode: _forward(original, mode))
        except LeftOutError as reason:
            self.left_out[str(reason)] += 1

    def _check_backward(self, original: OriginalCall) -> None:
        """Compare the gradients at the arguments of a call; one without any is none."""
        found = original.arrived["input"]
        if not found or not original.arrived["output"] or not self.selection.begins(original.call, "backward"):
            return
        self.selection.ends(original.call, "backward")
        original.check_intact(outputs=False)
        paths = sorted(found)
        self.check(original.call, [found[path] for path in paths], lambda mode: _backward(original, mode, paths))

    # ------------------------------------------------------------------ fix

    def _fixed(self, original: OriginalCall) -> Any:
        """Return the perturbed call's results in the original dtypes; the backward pass goes through them.

        A call is tried first, while nothing is recorded: at once, or for the next call of its kind.
        """
        kind = _kind_of(original)
        if kind not in self._tried and not self._records():
            self._waiting.append(original)
            self._check_waiting()
        if kind not in self._tried:
            self._waiting.append(original)
            self.left_out["to be tried first"] += 1
            return None
        storages = {tensor.untyped_storage().data_ptr() for tensor, _ in original.inputs}
        if any(tensor.untyped_storage().data_ptr() in storages for tensor in original.results):
            self.left_out["that return a view"] += 1
            return None
        changed = perturbed(self.settings.mode, original.args, original.kwargs) if self._tried[kind] else None
        if changed is None:
            self.left_out["left as they are"] += 1
            return None
        dtypes = iter([tensor.dtype for tensor in original.results])
        self.checked += 1
        again = original.function(*changed[0], **changed[1])
        return mapped(again, lambda value: _in_dtype(value, next(dtypes)) if isinstance(value, Tensor) else value)

    def _try(self, original: OriginalCall) -> None:
        """Find out whether a kind of call runs perturbed, where a refusal does no harm."""
        kind = _kind_of(original)
        if kind in self._tried:
            return
        self._tried[kind] = False
        try:
            self._tried[kind] = _forward(original, self.settings.mode) is not None
            if not self._tried[kind]:
                self.left_out[NOT_PERTURBED] += 1
        except REFUSED as error:
            self.left_out[f"failed again ({type(error).__name__})"] += 1

    # ------------------------------------------------------------------ comparison

    def pairs(self, first: Any, second: Any, *, integers: bool) -> list[tuple[int, Tensor, Tensor]]:
        """Return the comparable tensors of two flat lists of results, with their numbers."""
        return pairs(first, second, integers=integers)

    def difference(self, one: Tensor, other: Tensor) -> ResultDifference:
        """Return how far two results are apart."""
        return difference(self.settings.mode, self.settings.stage, one, other)

    def agrees_with_cpu(self, one: Tensor, cpu: Tensor) -> tuple[bool, ResultDifference]:
        """Return whether a result is as near to the CPU's as its dtype allows, and the largest relative error."""
        return agrees_with_cpu(one, cpu)

    def facts(self, tensor: Tensor) -> tuple[str, list[int]]:
        """Return a result's dtype and shape."""
        return str(tensor.dtype), [int(n) for n in tensor.shape]


def _writes(stem: str) -> bool:
    return changes_in_place(stem) or changes_buffers(stem)


def _forward(original: OriginalCall, mode: str) -> list[Any] | None:
    changed = perturbed(mode, original.args, original.kwargs)
    return None if changed is None else forward_again(original, *changed)


def _backward(original: OriginalCall, mode: str, paths: list[str]) -> list[Any] | None:
    """Return the gradients at the arguments with these paths."""
    received = dict(sorted(original.arrived["output"].items()))
    changed = perturbed(mode, (), received)
    arguments = perturbed(mode, original.args, original.kwargs) if mode in _WHOLE else None
    if changed is None and arguments is None:
        return None
    args, kwargs = arguments or (original.args, dict(original.kwargs))
    found = backward_again(original, args, kwargs, changed[1] if changed is not None else received)
    return [found.get(path) for path in paths]


def _kind_of(original: OriginalCall) -> str:
    """Return what decides whether a call runs: its operation, dtypes and shapes, and its other arguments."""

    def described(value: Any) -> str:
        return f"{value.dtype}{tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)

    return f"{original.call.stem}{mapped((original.args, dict(original.kwargs)), described)}"


def _in_dtype(tensor: Tensor, dtype: Any) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.astype(dtype)
