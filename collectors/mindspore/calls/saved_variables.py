"""Writes variables that the user's script saves, at level debug."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mindspore import Tensor

from trainsentry.collectors.calls.call import PART
from trainsentry.collectors.calls.dump_entries import VariableWriter
from trainsentry.collectors.guard import Guard
from trainsentry.collectors.mindspore.calls.tensor_facts import described, facts_of
from trainsentry.collectors.mindspore.hooks.function_patches import unwatch_compiled, watch_compiled
from trainsentry.collectors.mindspore.hooks.gradient_hooks import FLOATS, hooked_call
from trainsentry.collectors.mindspore.runtime import in_graph_mode, records_gradients, wait
from trainsentry.collectors.mindspore.saving import SUFFIX, save_tensor


class SavedVariables:
    """Describes variables as `<name>.<n>.debug` and their gradients as `<name>_grad.<n>.debug`.

    A hook travels with its tensor, and compiled code that gets it does not compile (MindSpore 2.10). So a compiled
    function gets, in place of a tensor with a hook, the result of an operation that only passes it on.
    """

    def __init__(self, guard: Guard, *, task: str) -> None:
        self.guard = guard
        self.save_files = task == "tensor"
        self.writer: VariableWriter | None = None
        self._counts: Counter[str] = Counter()
        self._pending: dict[str, _Pending] = {}
        self._handles: list[Any] = []

    def begin(self, writer: VariableWriter) -> None:
        """Begin a step, whose variables go to `writer`."""
        self.writer = writer
        self._counts.clear()

    def save(self, variable: Any, name: str, save_backward: bool) -> None:
        """Write a variable, and its gradients when they arrive."""
        wait()
        self.guard.run(PART, self._save, variable, name, save_backward)

    def end_step(self) -> None:
        """Write incomplete gradients, and close the file."""
        for key in list(self._pending):
            self.guard.run(PART, self._write_gradients, key)
        for handle in self._handles:
            handle.remove()
        if self._handles:
            unwatch_compiled(_without_hooks)
        self._handles.clear()
        writer, self.writer = self.writer, None
        if writer is not None:
            self.guard.run(PART, writer.close)

    close = end_step

    def _save(self, variable: Any, name: str, save_backward: bool) -> None:
        if self.writer is None:
            return
        key, gradient_key = (f"{of}.{self._counts[name]}.debug" for of in (name, f"{name}_grad"))
        self._counts[name] += 1
        tensors: dict[str, Tensor] = {}

        def take(tensor: Tensor, path: str) -> dict[str, Any]:
            tensors[path] = tensor
            return self._take(tensor, key, path)

        self.writer.entry(key, described(variable, "", take))
        if save_backward and records_gradients() and not in_graph_mode():
            self._watch(gradient_key, variable, {p: t for p, t in tensors.items() if t.dtype in FLOATS})

    def _watch(self, key: str, variable: Any, tensors: dict[str, Tensor]) -> None:
        if not tensors:
            return
        if not self._handles:
            watch_compiled(_without_hooks)
        self._pending[key] = _Pending(described(variable, "", lambda _, path: _Place(path)), len(tensors), {})
        for path, tensor in tensors.items():
            self._handles.append(tensor.register_hook(_hook(self, key, path)))

    def take_gradient(self, key: str, path: str, gradient: Tensor) -> None:
        """Take the gradient at one tensor of a variable; write all once the last has arrived."""
        pending = self._pending.get(key)
        if pending is not None:
            wait()
            pending.gradients[path] = self._take(gradient, key, path)
            if len(pending.gradients) == pending.awaited:
                self._write_gradients(key)

    def _write_gradients(self, key: str) -> None:
        pending = self._pending.pop(key)
        if self.writer is not None and pending.gradients:
            self.writer.entry(key, _filled(pending.shape, pending.gradients))

    def _take(self, tensor: Tensor, key: str, path: str) -> dict[str, Any]:
        facts = facts_of(tensor)
        if self.save_files and self.writer is not None:
            file = self.writer.tensor_path(f"{key}.{path or '0'}{SUFFIX}")
            save_tensor(tensor, file)
            facts["data_name"] = file.name
        return facts


@dataclass(frozen=True)
class _Pending:
    """A variable's nesting with places for its gradients, how many are awaited, and those that have arrived."""

    shape: Any
    awaited: int
    gradients: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class _Place:
    path: str


def _filled(shape: Any, gradients: dict[str, dict[str, Any]]) -> Any:
    """Return a nesting with gradients in their places, and None for what has none."""
    if isinstance(shape, _Place):
        return gradients.get(shape.path)
    if isinstance(shape, list):
        return [_filled(item, gradients) for item in shape]
    if isinstance(shape, dict) and not {"type", "value"} <= set(shape):
        return {key: _filled(item, gradients) for key, item in shape.items()}
    return None


def _without_hooks(_: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a compiled function with tensors that carry no hooks, through which the gradients flow back."""
    args, kwargs = hooked_call(args, kwargs, lambda *_: None)
    return run(*args, **kwargs)


def _hook(owner: SavedVariables, key: str, path: str) -> Callable[[Any], None]:
    def hook(gradient: Any) -> None:
        if isinstance(gradient, Tensor):
            owner.guard.run(PART, owner.take_gradient, key, path, gradient)

    return hook
