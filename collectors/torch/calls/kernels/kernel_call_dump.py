"""The debugger's watcher for level L2: has the device's software dump the kernels of one call of each step."""

import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor

from trainsentry.collectors.calls.call import PART
from trainsentry.collectors.calls.call_selection import CallSelection
from trainsentry.collectors.guard import Guard
from trainsentry.collectors.torch.calls.call_gradients import Edges, GradientsOfCall
from trainsentry.collectors.torch.calls.call_names import CallNames
from trainsentry.collectors.torch.calls.free_benchmark.again import OriginalCall, as_it_was, remember, with_leaves
from trainsentry.collectors.torch.calls.kernels.kernel_request import KernelRequest
from trainsentry.collectors.torch.calls.watch_operations import OperationMode, enter_below, leave
from trainsentry.collectors.torch.device.device import KernelDumpSwitch
from trainsentry.collectors.torch.device.registry import stream_is_captured
from trainsentry.collectors.torch.hooks.backward_pass import after_backward, in_backward, next_node_number
from trainsentry.collectors.torch.hooks.nested_tensors import list_tensors
from trainsentry.collectors.torch.saving import load_tensor

logger = logging.getLogger("trainsentry")

AS_IT_WAS: Final = "no_change"
"""The mode of free_benchmark that makes a call again without a change."""


class KernelCallDump:
    """Counts calls as level L1 does, and switches the dump on around one of them; task and watcher in one.

    `folder` is the debugger's `dump_path`, `rank` returns this process's rank. A forward call is dumped while the
    training makes it, a backward pass from its first node to its last. With `request.gradients` the call is made again
    and its backward pass follows at once; random numbers and arguments stay as they are.
    """

    after_call: Callable[[], None] | None = None
    writer: Any = None

    def __init__(
        self,
        guard: Guard,
        request: KernelRequest,
        switch: KernelDumpSwitch,
        names: CallNames,
        folder: Path,
        rank: Callable[[], int],
    ) -> None:
        self.guard = guard
        self.request = request
        self.selection = CallSelection(level="L1")
        self.iteration = 0
        self.running = False
        self.steps = 0
        self._switch = switch
        self._names = names
        self._root = folder.absolute()
        self._rank = rank
        self._counts: Counter[str] = Counter()
        self._leaves = Edges()
        self._mode: OperationMode | None = None
        self._threads = threading.local()
        self._found = False
        self._is_on = False
        self._before: set[Path] = set()

    # ------------------------------------------------------------------ called by the debugger's session

    def start(self, modules: Sequence[Any], *, window: bool = False) -> None:
        """Start counting calls of operations; modules play no part."""
        del modules, window
        if not self.running:
            self.running = True
            self._mode = OperationMode(self.guard, PART, self._names, self.call_operation, lambda: None)
            enter_below(self._mode)

    def stop(self) -> None:
        """Stop counting; a backward pass is dumped until `reset`."""
        if self._mode is not None:
            leave(self._mode)
        self._mode, self.running = None, False
        self._leaves.forget()

    def reset(self) -> None:
        """End the step."""
        self._end()
        if self._counts and not self._found:
            what = "was not called" if self._counts[self._stem] <= self._number else "had no backward pass"
            logger.warning("trainsentry: L2: step %d: %s %s", self.iteration, self.request.name, what)
        self.steps += 1
        self._found = False
        self._counts.clear()

    def call_custom(self, stem: str, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a user's function."""
        return self.call_operation(stem, function, args, kwargs, None)

    # ------------------------------------------------------------------ called at each call

    def call_operation(
        self, stem: str, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], frame: FrameType | None
    ) -> Any:
        """Call an operation, and have its kernels dumped if it is the one that is asked for."""
        del frame
        if getattr(self._threads, "inside", False):
            return function(*args, **kwargs)
        self._threads.inside = True
        try:
            if not self.guard.run(PART, self._is_wanted, stem, args, kwargs):
                return function(*args, **kwargs)
            if self.request.direction == "forward":
                return self._forward(function, args, kwargs)
            if self.request.gradients:
                return self._with_given_gradients(stem, function, args, kwargs)
            return self._with_own_backward(function, args, kwargs)
        finally:
            self._threads.inside = False

    @property
    def _stem(self) -> str:
        return self.request.call.rpartition(".")[0]

    @property
    def _number(self) -> int:
        return int(self.request.call.rpartition(".")[2])

    def _is_wanted(self, stem: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Count a call; return whether it is the one."""
        if not list_tensors((*args, *kwargs.values())):
            return False
        number = self._counts[stem]
        self._counts[stem] += 1
        return f"{stem}.{number}" == self.request.call

    def _forward(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self.guard.run(PART, self._begin)
        try:
            return function(*args, **kwargs)
        finally:
            self._end()

    def _with_own_backward(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        tensors = list_tensors((*args, *kwargs.values()))
        edges = self.guard.run(PART, lambda: [self._leaves.of(t) for t in tensors])
        since = next_node_number()
        output = function(*args, **kwargs)
        if edges is not None and torch.is_grad_enabled():
            self.guard.run(PART, self._await_backward, args[0] if output is None else output, edges, since)
        return output

    def _await_backward(self, output: Any, edges: list[Any], since: int) -> None:
        outputs = list_tensors([output])
        if any(t.requires_grad for t in outputs):
            GradientsOfCall(outputs, edges, since, _KernelsOfBackward(self))

    # ------------------------------------------------------------------ backward, from gradients in files

    def _with_given_gradients(self, stem: str, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        original = self.guard.run(PART, lambda: remember(stem, function, args, kwargs, known_to_change=True))
        output = function(*args, **kwargs)
        if original is not None:
            self.guard.run(PART, self._backward_again, original)
        return output

    def _backward_again(self, original: OriginalCall) -> None:
        """Make the call again, and dump its backward pass alone."""
        self._found = True
        args, kwargs, leaves = with_leaves(original, original.args, original.kwargs)
        with torch.enable_grad(), as_it_was(original, AS_IT_WAS):
            given = original.function(*args, **kwargs)
            results = [t for t in list_tensors([args[0] if given is None else given]) if t.requires_grad]
            gradients = self._loaded(results)
            needed = list({id(leaf): leaf for leaf in leaves if leaf is not None}.values())
            if gradients is None or not needed:
                return
            self._begin()
            try:
                torch.autograd.grad(results[: len(gradients)], needed, gradients, allow_unused=True)
            finally:
                self._end()

    def _loaded(self, results: Sequence[Tensor]) -> list[Tensor] | None:
        """Return the gradients in the files, on the device of the results; None where they do not fit."""
        gradients = [load_tensor(path) for path in self.request.gradients]
        shapes = [[list(t.shape) for t in side] for side in (gradients, results)]
        if shapes[0] != shapes[1][: len(gradients)]:
            logger.warning(
                "trainsentry: L2: step %d: %s is not dumped: backward_input has the shapes %s, its results %s",
                self.iteration, self.request.name, *shapes,
            )  # fmt: skip
            return None
        return [g.to(r.device, r.dtype) for g, r in zip(gradients, results, strict=False)]

    # ------------------------------------------------------------------ the switch

    def wants_backward(self, step: int) -> bool:
        """Whether the backward pass of the call is dumped: the first one in its step."""
        return step == self.steps and not self._found and PART not in self.guard.disabled

    def _begin(self) -> None:
        """Switch the dump on."""
        if stream_is_captured():
            logger.warning("trainsentry: L2: %s is being captured in a graph, and not dumped", self.request.name)
            return
        self._found = True
        step, rank = self._root / f"step{self.iteration}", self._rank()
        data = Path(self.request.acl.get("dump_path", step if not self.request.patterns else step / f"rank{rank}"))
        data.mkdir(parents=True, exist_ok=True)
        step.mkdir(parents=True, exist_ok=True)
        path = step / f"kernel_config_{rank}.json"
        path.write_text(json.dumps({"dump": {**self.request.acl, "dump_path": str(data)}}, indent=4), encoding="utf-8")
        self._data = data
        self._before = set(data.rglob("*"))
        self._switch.begin(path)
        self._is_on = True

    def _end(self) -> None:
        """Switch the dump off, also when this part is switched off; without effect when it is not on."""
        if not self._is_on:
            return
        self._is_on = False
        try:
            self._switch.end()
            self._sort_out()
        except Exception as error:  # noqa: BLE001 - the device's software refuses; the training goes on
            self.guard.report(PART, error)

    def _sort_out(self) -> None:
        """Keep the kernels whose names are asked for, and say what there is."""
        new = [path for path in self._data.rglob("*") if path not in self._before and path.is_file()]
        new = [path for path in new if not path.name.startswith("kernel_config_")]
        kept = [path for path in new if _is_kept(path.name, self.request.patterns)]
        for path in set(new) - set(kept):
            path.unlink(missing_ok=True)
        level, what = (logging.INFO, f"{len(kept)} files") if kept else (logging.WARNING, "no file")
        more = f"; {len(new) - len(kept)} of other kernels" if len(new) > len(kept) else ""
        name = self.request.name
        logger.log(level, "trainsentry: L2: step %d: %s: %s in %s%s", self.iteration, name, what, self._data, more)


class _KernelsOfBackward:
    """Listens to the gradients of the call, to switch the dump on and off."""

    def __init__(self, dump: KernelCallDump) -> None:
        self.dump = dump
        self.step = dump.steps

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function under the guard."""
        return self.dump.guard.run(PART, function, *args)

    def began(self, gradients: GradientsOfCall) -> bool:
        """Switch the dump on, before the first node of the call runs."""
        if not self.dump.wants_backward(self.step):
            return False
        self.dump._begin()
        if in_backward():
            after_backward(lambda: self.run(gradients.finish))  # where an input gets no gradient
        return True

    def arrived(self, place: int, gradient: Tensor) -> None:
        """Take no gradient."""

    def done(self, inputs: list[Any], outputs: list[Tensor | None]) -> None:
        """Switch the dump off, after the last node of the call."""
        self.dump._end()


def _is_kept(file_name: str, patterns: Sequence[Any]) -> bool:
    """Whether a file of acl (`<type>.<name>.<task>.<stream>.<time>`) is of a kernel that is asked for.

    >>> import re
    >>> [_is_kept(name, [re.compile("MatMul.*")]) for name in ("MatMulV2.mm.3.0.17", "Add.Add.4.0.17")]
    [True, False]
    """
    parts = file_name.split(".")
    return not patterns or any(p.fullmatch(part) for p in patterns for part in (parts[0], ".".join(parts[1:-3])))
