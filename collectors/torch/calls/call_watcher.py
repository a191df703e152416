"""Watches calls of modules and operations, forward and backward, and passes them to a task."""

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trainsentry.collectors.calls.call import PART, Call, CallTask
from trainsentry.collectors.calls.call_selection import CallSelection
from trainsentry.collectors.calls.call_stacks import CallStacks
from trainsentry.collectors.guard import Guard
from trainsentry.collectors.shared.model_graph import NamedModule
from trainsentry.collectors.torch.calls.call_arguments import (
    CallArguments,
    changed_by,
    has_arrived,
    is_collective,
    may_change,
    without_buffers,
)
from trainsentry.collectors.torch.calls.call_gradients import (
    Edges,
    GradientsOfCall,
    ParameterGradients,
    ReportsToWatcher,
)
from trainsentry.collectors.torch.calls.call_names import CallNames
from trainsentry.collectors.torch.calls.watch_modules import ModuleCallHooks, changes_nothing
from trainsentry.collectors.torch.calls.watch_operations import OperationMode, enter_below, leave
from trainsentry.collectors.torch.distributed.collective_writes import CollectiveWrites
from trainsentry.collectors.torch.hooks.any_step import after_whole_steps
from trainsentry.collectors.torch.hooks.backward_pass import after_backward, in_backward, next_node_number
from trainsentry.collectors.torch.hooks.nested_tensors import list_tensors


class QuietSection:
    """Does what `with lock, torch.no_grad()` does, at a quarter of its cost: it is entered several times per call."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._before: list[bool] = []  # belongs to the thread that holds the lock

    def __enter__(self) -> None:
        self._lock.acquire()
        self._before.append(torch.is_grad_enabled())
        torch._C._set_grad_enabled(False)

    def __exit__(self, *error: object) -> None:
        torch._C._set_grad_enabled(self._before.pop())
        self._lock.release()


CLIP_GRAD: Final = torch.nn.utils.clip_grad.__file__
"""The file of gradient clipping, whose operations belong to no module."""


class CallWatcher:
    """Numbers calls, finds the module that contains each, and hooks their backward passes.

    Calls are seen between `start` and `stop`. Their backward passes are recorded until `reset`, also after `stop`.
    With `parameters`, also takes the gradients of modules' own parameters. `after_call` is called after each call and
    each gradient, outside the guard, so that it can stop the training. `part` is the guard's name of the watcher.
    """

    def __init__(
        self,
        guard: Guard,
        task: CallTask,
        selection: CallSelection,
        names: CallNames,
        *,
        stacks: bool = True,
        parameters: bool = True,
        part: str = PART,
    ) -> None:
        self.guard = guard
        self.task = task
        self.selection = selection
        self.names = names
        self.stacks = CallStacks() if stacks else None
        self.parameters = parameters
        self.part = part
        self.after_call: Callable[[], None] | None = None
        self.running = False
        self.steps = 0
        self._in_window = False
        self._awaits_backward = False
        self._stems_passed: set[str] = set()
        self._arguments = CallArguments()
        self._leaves = Edges()
        self._counts: Counter[str] = Counter()
        self._gradient_counts: Counter[str] = Counter()
        self._threads = threading.local()
        self._quietly = QuietSection()
        self._mode: OperationMode | None = None
        self._modules: ModuleCallHooks | None = None
        self._parameters: dict[str, ParameterGradients] = {}
        self._open: dict[int, Any] = {}
        self._backward_done: set[str] = set()
        self._under_way: list[tuple[Call, Any]] = []
        self._scope: str | None = None
        self._clips: dict[int, bool] = {}
        self._handles: list[Any] = []

    def start(self, modules: Sequence[NamedModule], *, window: bool = False) -> None:
        """Start watching; `modules` are the modules whose calls are watched, in a `window` whatever the level."""
        if not self.running:
            self.running = self._awaits_backward = True
            self.guard.run(self.part, self._attach, modules, window)

    def _attach(self, modules: Sequence[NamedModule], window: bool) -> None:
        sees_modules, self._in_window = self.selection.sees_modules, window
        self._handles = [CollectiveWrites(self.guard, self._before_change)]
        if sees_modules or window:
            self._modules = ModuleCallHooks(self, modules)
        if self.selection.sees_operations and (sees_modules or not window):
            self._handles += [
                register_optimizer_step_pre_hook(lambda *_: self._enter("optimizer")),
                after_whole_steps(lambda: self._enter(None)),
            ]
            self._mode = OperationMode(self.guard, self.part, self.names, self.call_operation, self._before_change)
            enter_below(self._mode)

    def stop(self) -> None:
        """Stop watching calls, and have the task write what it has kept; backward passes are still recorded."""
        if not self.running:
            return
        self.running = False
        if self._mode is not None:
            leave(self._mode)
            self._mode = None
        if self._modules is not None:
            self._modules.close()
            self._modules = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._finish_gradients()
        self.guard.run(self.part, lambda: self._collect_arrived(pending_too=True))
        self._leaves.forget()
        self.guard.run(self.part, self.task.flush)

    def reset(self) -> None:
        """End the step: no backward pass of its calls is recorded any more, and calls are numbered from 0 again."""
        if self._awaits_backward:
            self._finish_gradients()
            self.guard.run(self.part, self.task.flush)
        self._awaits_backward = self.running
        self.steps += 1
        self._counts.clear()
        self._gradient_counts.clear()
        self._open.clear()
        self._backward_done.clear()
        self._scope = None
        self.selection.reset()
        for gradients in self._parameters.values():
            gradients.close()
        self._parameters.clear()
        self._calls_here.clear()
        self.task.forget()

    def call_custom(self, stem: str, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a user's function, and record the call; operations inside it are not watched."""
        if getattr(self._threads, "inside", False):
            return function(*args, **kwargs)
        self._threads.inside = True
        try:
            with torch._C.DisableTorchFunction():
                call = self.guard.run(self.part, self.begin, stem, None, args, kwargs)
            try:
                output = function(*args, **kwargs)
            except BaseException:
                self._drop(call)
                raise
            with torch._C.DisableTorchFunction():
                self.finish(call, output, None)
            return output
        finally:
            self._threads.inside = False

    def call_operation(
        self, stem: str, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], frame: FrameType | None
    ) -> Any:
        """Call an operation, and record the call; `frame` is the caller's."""
        if getattr(self._threads, "inside", False):
            return function(*args, **kwargs)
        written = self.guard.run(self.part, self._arguments.as_written, frame, args, kwargs)
        call = self.guard.run(self.part, self.begin, stem, None, *(written or (args, kwargs)))
        try:
            output = function(*args, **kwargs)
        except BaseException:
            self.guard.run(self.part, self._drop, call)
            raise
        self.finish(call, output, None)
        return output

    def finish(self, call: Call | None, output: Any, module: nn.Module | None) -> None:
        """End a call under the guard; None is one that is not watched."""
        if call is not None:
            self.guard.run(self.part, self.end, call, output, module)
            if self.after_call is not None:
                self.after_call()

    def begin(self, stem: str, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
        """Number a call, find its parent, and have the task take its inputs; return None for one without tensors."""
        calls = self._calls_here
        parent = next((c for c in reversed(calls) if c.is_module), None)
        call = Call(stem, self._counts[stem], module is not None, parent)
        if self._under_way:
            self._collect_arrived()
        tensors = list_tensors((*args, *kwargs.values()))
        if module is None and not tensors:
            return None
        if self._in_window and module is None and parent is None:  # outside the window's module
            self._read_before(call, module, args, kwargs)
            return None
        self._counts[stem] += 1
        calls.append(call)
        call.recomputed = in_backward()
        call.changed = changed_by(stem, args, kwargs)
        call.recorded = self.selection.begins(call, "forward")
        call.traced = torch.is_grad_enabled() and self.selection.may_begin(call, "backward")
        if call.recorded and self.task.writer is not None:
            with self._quietly:
                self._take_inputs(call, self.task.writer, args, kwargs)
        self._read_before(call, module, args, kwargs)
        self._note_edges(call, tensors)
        return call

    def _take_inputs(self, call: Call, writer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        number = self.stacks.here() if self.stacks is not None else 0
        if call.parent is None:
            call.scope = self._scope_of(number)
        writer.parent(call.name(), call.parent_name())
        if self.stacks is not None:
            writer.stack(call.name(), number, self.stacks.text(number))
        self.task.before(call, *without_buffers(call.stem, args, kwargs))

    def _read_before(self, call: Call, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Read what waits before a call that may change it: unseen operations of a module may change any."""
        unseen = self._mode is None and module is not None and not changes_nothing(module)
        if unseen if call.is_module else may_change(call.stem, args, kwargs):
            self._before_change()

    def _before_change(self, uncounted: Sequence[Tensor] = ()) -> None:
        """Have the task read what it has taken, before an operation changes it, perhaps uncounted by autograd."""
        with self._quietly:
            self.task.before_change(uncounted)

    def end(self, call: Call, output: Any, module: nn.Module | None) -> None:
        """Have the task take a call's outputs, and watch its backward pass."""
        self._drop(call)
        self.selection.ends(call, "forward")
        if is_collective(call.stem):
            self._under_way.append((call, output))
            self._collect_arrived()
            return
        self._take_output(call, output, module)
        if call.traced and torch.is_grad_enabled():
            self._watch_gradients(call, output)
            if module is not None and self.parameters:
                self._parameters_of(call).watch(module)
        call.edges, call.changed = [], None

    def _take_output(self, call: Call, output: Any, module: nn.Module | None) -> None:
        if call.recorded and self.task.writer is not None:
            with self._quietly:
                self.task.after(call, output, module)
                if self._mode is None:  # operations between modules are not seen
                    self.task.before_change(())

    def _collect_arrived(self, *, pending_too: bool = False) -> None:
        """Take the outputs of collectives that have ended, without waiting; with `pending_too`, end the others too."""
        waiting = []
        for call, output in self._under_way:
            if pending_too or has_arrived(output):
                arrived = has_arrived(output)
                self._take_output(call, tuple(call.changed or ()) if arrived else None, None)
                call.edges, call.changed = [], None
            else:
                waiting.append((call, output))
        self._under_way = waiting

    def _drop(self, call: Call | None) -> None:
        """Remove a call from the stack, with the calls inside it that never ended."""
        calls = self._calls_here
        if call in calls:
            del calls[calls.index(call) :]

    def _note_edges(self, call: Call, tensors: Sequence[Tensor]) -> None:
        """Note the edges of a traced call's inputs."""
        if call.traced:
            call.edges = [self._leaves.of(tensor) for tensor in tensors]
            call.sequence = next_node_number()

    def _watch_gradients(self, call: Call, output: Any) -> None:
        outputs = list_tensors([call.changed if output is None else output])
        if not any(t.requires_grad for t in outputs):
            return
        GradientsOfCall(outputs, call.edges, call.sequence, ReportsToWatcher(self, call))

    def backward_begins(self, call: Call, gradients: Any) -> bool:
        """Note that a backward pass has reached a call; return whether its gradients are needed."""
        if not self._awaits_backward or self.part in self.guard.disabled:
            return False
        self._stems_passed.add(call.stem)
        call.recorded = self.selection.begins(call, "backward")
        name = call.name("backward")
        if call.recorded and name in self._backward_done:
            self.guard.warn_once(
                f"{self.part} (several backward passes)",
                f"{name}: a second backward pass through the same call is not recorded",
            )
            return False
        self._backward_done.add(name)
        if call.recorded and self.task.writer is not None:
            with self._quietly:
                self.task.writer.parent(name, call.parent_name("backward"))
        self._will_finish(gradients)
        return True

    def _will_finish(self, gradients: Any) -> None:
        if not self._open and in_backward():
            after_backward(self._finish_gradients)
        self._open[id(gradients)] = gradients

    def gradient_arrived(self, call: Call, place: int, gradient: Tensor) -> Any:
        """Have the task take the gradient at an output; return what the task keeps of it."""
        if not call.recorded or self.task.writer is None:
            return None
        with self._quietly:
            return self.task.gradient_arrived(call, place, gradient)

    def backward_done(self, call: Call, inputs: Sequence[Any], outputs: Sequence[Tensor | None]) -> None:
        """Pass the gradients of a call to the task."""
        if not self._awaits_backward:
            return
        if call.recorded and self.task.writer is not None:
            with self._quietly:
                self.task.gradients(call, inputs, outputs)
        self.selection.ends(call, "backward")

    def _parameters_of(self, call: Call) -> ParameterGradients:
        known = self._parameters.get(call.stem)
        if known is None:

            def done(gradients: dict[str, Tensor]) -> None:
                self._parameter_gradients(call, gradients)

            known = self._parameters[call.stem] = ParameterGradients(self.guard, self._will_finish, done)
        return known

    def _parameter_gradients(self, call: Call, gradients: dict[str, Tensor]) -> None:
        if not self.running and call.stem not in self._stems_passed:
            return  # gradients of calls after `stop`, whose backward passes are not recorded
        number = self._gradient_counts[call.stem]
        self._gradient_counts[call.stem] += 1
        if self.task.writer is not None and (self.selection.scope is None or call.recorded):
            with self._quietly:
                self.task.parameter_gradients(f"{call.stem}.parameters_grad.{number}", gradients)

    def _finish_gradients(self) -> None:
        """Pass on incomplete gradients when the backward pass is over: not every input of a call has one."""
        opened, self._open = self._open, {}
        for gradients in opened.values():
            self.guard.run(self.part, gradients.finish)
        self._stems_passed.clear()
        self.task.forget()

    def _enter(self, scope: str | None) -> None:
        self._scope = scope
        self.task.forget()
        if scope is not None and self.task.writer is not None:
            self.guard.run(self.part, self.task.writer.parent, scope, None)

    def _scope_of(self, number: int) -> str | None:
        if self._scope is not None or self.stacks is None:
            return self._scope
        clips = self._clips.get(number)
        if clips is None:
            lines = self.stacks.text(number)
            clips = self._clips[number] = any(line.startswith(f"File {CLIP_GRAD},") for line in lines)
        if clips:
            assert self.task.writer is not None
            self.task.writer.parent("clip_grad", None)
            return "clip_grad"
        return None

    @property
    def _calls_here(self) -> list[Call]:
        """The calls under way on this thread, outermost first."""
        calls: list[Call] | None = getattr(self._threads, "calls", None)
        if calls is None:
            calls = self._threads.calls = []
        return calls
