"""The debugger's watcher for free_benchmark: makes each call again, perturbed, and compares or passes on results."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from trainsentry.collectors.calls.benchmark_task import NOT_PERTURBED, REFUSED, BenchmarkTask
from trainsentry.collectors.calls.call import Call
from trainsentry.collectors.calls.call_selection import CallSelection
from trainsentry.collectors.calls.free_benchmark import PART, BenchmarkSettings, ResultDifference
from trainsentry.collectors.guard import Guard
from trainsentry.collectors.torch.calls.call_arguments import is_collective
from trainsentry.collectors.torch.calls.call_gradients import Edges, GradientsOfCall
from trainsentry.collectors.torch.calls.call_names import CallNames
from trainsentry.collectors.torch.calls.free_benchmark.again import OriginalCall, as_it_was, remember, with_leaves
from trainsentry.collectors.torch.calls.free_benchmark.comparison import agrees_with_cpu, difference, pairs
from trainsentry.collectors.torch.calls.free_benchmark.gradients import BackwardTrial
from trainsentry.collectors.torch.calls.free_benchmark.perturbations import mapped, perturbed
from trainsentry.collectors.torch.calls.watch_operations import OperationMode, enter_below, leave
from trainsentry.collectors.torch.hooks.backward_pass import in_backward, next_node_number
from trainsentry.collectors.torch.hooks.nested_tensors import list_tensors

logger = logging.getLogger("trainsentry")


@dataclass(slots=True)
class _Trial:
    call: Call
    original: OriginalCall
    edges: list[Any]
    sequence: int


class CallBenchmark(BenchmarkTask):
    """Benchmarks the calls of operations between `start` and `stop`; task and watcher of the debugger in one.

    In `check` mode the training gets the original results, and a row of the table tells each that is inconsistent. In
    `fix` mode it gets those of the perturbed call, in the original dtype. A call that cannot be made again is counted
    in `left_out` by reason, and is never an error.
    """

    after_call: Callable[[], None] | None = None
    writer: Any = None

    def __init__(self, guard: Guard, settings: BenchmarkSettings, selection: CallSelection, names: CallNames) -> None:
        super().__init__(settings)
        self.guard = guard
        self.selection = selection
        self.names = names
        self.running = False
        self._counts: Counter[str] = Counter()
        self._changing: set[str] = set()
        self._leaves = Edges()
        self._mode: OperationMode | None = None
        self._threads = threading.local()
        self.steps = 0

    # ------------------------------------------------------------------ called by the debugger's session

    def start(self, modules: Sequence[Any], *, window: bool = False) -> None:
        """Start watching operations; modules play no part."""
        del modules, window
        if not self.running:
            self.running = True
            self._mode = OperationMode(self.guard, PART, self.names, self.call_operation, lambda: None)
            enter_below(self._mode)

    def stop(self) -> None:
        """Stop watching; the backward passes of the watched calls are checked until `reset`."""
        if self._mode is not None:
            leave(self._mode)
        self._mode, self.running = None, False
        self._leaves.forget()

    def reset(self) -> None:
        """End the step."""
        if self._counts:
            logger.info("trainsentry: free_benchmark: step %d: %s", self.iteration, self.summary())
        self.steps += 1
        self._counts.clear()
        self.selection.reset()

    def call_custom(self, stem: str, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call and benchmark a user's function."""
        return self.call_operation(stem, function, args, kwargs, None)

    # ------------------------------------------------------------------ called at each call

    def call_operation(
        self, stem: str, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], frame: FrameType | None
    ) -> Any:
        """Call an operation; return its result, or in `fix` mode that of the perturbed call."""
        del frame
        if getattr(self._threads, "inside", False) or in_backward():  # a recomputation was checked when it was new
            return function(*args, **kwargs)
        self._threads.inside = True
        try:
            trial = self.guard.run(PART, self._begin, stem, function, args, kwargs)
            output = function(*args, **kwargs)
            if trial is None:
                return output
            given = self.guard.run(PART, self._end, trial, output)
            return output if given is None else given
        finally:
            self._threads.inside = False

    def _begin(self, stem: str, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Trial | None:
        tensors = list_tensors((*args, *kwargs.values()))
        if not tensors:
            return None
        call = Call(stem, self._counts[stem], is_module=False)
        self._counts[stem] += 1
        stage = self.settings.stage
        chosen = self.selection.begins(call, stage) if stage == "forward" else self.selection.may_begin(call, stage)
        if stage == "forward":
            self.selection.ends(call, stage)
        chosen = chosen and (stage == "forward" or torch.is_grad_enabled())
        if not chosen or not any(t.is_floating_point() or t.is_complex() for t in tensors):
            return None
        if is_collective(stem):
            self.left_out["collectives"] += 1
            return None
        original = remember(stem, function, args, kwargs, known_to_change=stem in self._changing)
        if original.changes and (self.settings.fixes or stage == "backward"):
            self.left_out["that change their arguments"] += 1
            return None
        edges = [self._leaves.of(t) for t in tensors] if stage == "backward" else []
        return _Trial(call, original, edges, next_node_number())

    def _end(self, trial: _Trial, output: Any) -> Any:
        """Benchmark a call that has been made; return the result to pass on, None for the original."""
        call = trial.original
        if not call.changes and not call.is_intact:
            self._changing.add(trial.call.stem)  # from now on it gets copies
            self.left_out["that change their arguments"] += 1
        elif self.settings.stage == "backward":
            self._await_backward(trial, output)
        elif self.settings.fixes:
            return self._fixed(trial, output)
        else:
            results = list_tensors([call.given[0][0] if output is None else output])
            with torch.no_grad():
                self.check(trial.call, results, lambda mode: self._forward_again(call, mode))
        return None

    def _forward_again(self, call: OriginalCall, mode: str) -> list[Any] | None:
        """Make the call again, apart from the training's graph; its arguments stay as they are."""
        args, kwargs = mapped((call.args, dict(call.kwargs)), Tensor.detach)
        changed = perturbed(mode, args, kwargs, autocast=call.under_autocast)
        if changed is None:
            return None
        args, kwargs, leaves = with_leaves(call, *changed)
        with torch.set_grad_enabled(any(leaf is not None for leaf in leaves)), as_it_was(call, mode):
            output = call.function(*args, **kwargs)
        return list_tensors([list_tensors([*args, *kwargs.values()])[0] if output is None else output])

    def _fixed(self, trial: _Trial, output: Any) -> Any:
        """Return the perturbed call's results in the original dtypes and places; autograd goes through them."""
        call, results = trial.original, list_tensors([output])
        try:
            storages = {t.untyped_storage().data_ptr() for t, _ in call.given}
            if any(t.untyped_storage().data_ptr() in storages for t in results):
                self.left_out["that return a view"] += 1
                return None
            changed = perturbed(self.settings.mode, call.args, call.kwargs, autocast=call.under_autocast)
            if changed is None:
                self.left_out[NOT_PERTURBED] += 1
                return None
            with as_it_was(call, self.settings.mode, hidden=False):
                again = call.function(*changed[0], **changed[1])
        except REFUSED as error:
            self.left_out[f"failed again ({type(error).__name__})"] += 1
            return None
        places = iter(results)
        self.checked += 1
        return mapped(again, lambda t: t.to(*_place(next(places))))

    # ------------------------------------------------------------------ backward

    def _await_backward(self, trial: _Trial, output: Any) -> None:
        outputs = list_tensors([output])
        if torch.is_grad_enabled() and any(t.requires_grad for t in outputs):
            GradientsOfCall(outputs, trial.edges, trial.sequence, BackwardTrial(self, trial.call, trial.original))

    def wants_backward(self, call: Call, step: int) -> bool:
        """Whether the backward pass of a call is checked."""
        chosen = step == self.steps and PART not in self.guard.disabled and self.selection.begins(call, "backward")
        self.selection.ends(call, "backward")
        return chosen

    # ------------------------------------------------------------------ comparison

    def pairs(self, first: Any, second: Any, *, integers: bool) -> list[tuple[int, Tensor, Tensor]]:
        """Return the comparable tensors of two flat lists of results, with their numbers."""
        return pairs(first, second, integers=integers)

    def difference(self, one: Tensor, other: Tensor) -> ResultDifference:
        """Return how far two results are apart."""
        return difference(self.settings.mode, self.settings.stage, one, other)

    def agrees_with_cpu(self, one: Tensor, cpu: Tensor) -> tuple[bool, ResultDifference]:
        """Return whether a result is as near to the CPU's as its dtype allows, and the largest relative error."""
        return agrees_with_cpu(one, cpu, one.dtype)

    def facts(self, tensor: Tensor) -> tuple[str, list[int]]:
        """Return a result's dtype and shape."""
        return str(tensor.dtype), list(tensor.shape)


def _place(original: Tensor) -> tuple[torch.device, torch.dtype]:
    return original.device, original.dtype
