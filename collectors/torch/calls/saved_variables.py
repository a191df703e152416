"""Writes variables that the user's script saves, and the gradients at them."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from trainsentry.collectors.calls.call import PART
from trainsentry.collectors.calls.dump_entries import VariableWriter
from trainsentry.collectors.guard import Guard
from trainsentry.collectors.torch.calls.tensor_facts import TensorFacts
from trainsentry.collectors.torch.calls.values import describe
from trainsentry.collectors.torch.hooks.nested_tensors import tensors_in
from trainsentry.collectors.torch.saving import SUFFIX, save_tensor


class SavedVariables:
    """Describes variables as `<name>.<n>.debug` and their gradients as `<name>_grad.<n>.debug`."""

    def __init__(self, facts: TensorFacts, guard: Guard, *, task: str) -> None:
        self.facts = facts
        self.guard = guard
        self.save_files = task == "tensor"
        self.writer: VariableWriter | None = None
        self._counts: Counter[str] = Counter()
        self._pending: dict[str, tuple[Any, dict[str, Any], int]] = {}
        self._handles: list[Any] = []

    def save(self, variable: Any, name: str, save_backward: bool) -> None:
        """Write a variable, and its gradients when they arrive."""
        self.guard.run(PART, self._save, variable, name, save_backward)

    def begin(self, writer: VariableWriter) -> None:
        """Begin a step, whose variables go to `writer`."""
        self.writer = writer
        self._counts.clear()

    def end_step(self) -> None:
        """Write incomplete gradients, and close the file."""
        for key in list(self._pending):
            self.guard.run(PART, self._write_gradients, key)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        writer, self.writer = self.writer, None
        if writer is not None:
            self.guard.run(PART, writer.close)

    close = end_step

    def _save(self, variable: Any, name: str, save_backward: bool) -> None:
        if self.writer is None:
            return
        key = f"{name}.{self._counts[name]}.debug"
        gradient_key = f"{name}_grad.{self._counts[name]}.debug"
        self._counts[name] += 1
        with torch.no_grad(), torch._C.DisableTorchFunction():
            content = describe(variable, "", lambda tensor, path: self._take(tensor, key, path))
            self.facts.settle()
        self.writer.entry(key, content)
        if save_backward and torch.is_grad_enabled():
            tensors = [(path, t) for path, t in tensors_in(variable) if t.requires_grad]
            if tensors:
                self._pending[gradient_key] = (variable, {}, len(tensors))
            for path, tensor in tensors:
                self._handles.append(tensor.register_hook(_Gradient(self, gradient_key, path)))

    def take_gradient(self, key: str, path: str, gradient: Tensor) -> None:
        """Take the gradient at one tensor of a variable; write all once the last has arrived."""
        pending = self._pending.get(key)
        if pending is None:
            return
        with torch.no_grad():
            pending[1][path] = self._take(gradient, key, path)
        if len(pending[1]) == pending[2]:
            self._write_gradients(key)

    def _write_gradients(self, key: str) -> None:
        variable, gradients, _ = self._pending.pop(key)
        self.facts.settle()
        if self.writer is not None and gradients:
            shape = _only_tensors(variable, "", gradients)
            self.writer.entry(key, shape)

    def _take(self, tensor: Tensor, key: str, path: str) -> dict[str, Any]:
        facts = self.facts.describe(tensor)
        if self.save_files and self.writer is not None and tensor.layout is torch.strided and not tensor.is_meta:
            path_of_file = self.writer.tensor_path(f"{key}.{path or '0'}{SUFFIX}")
            save_tensor(tensor, path_of_file)
            facts["data_name"] = path_of_file.name
        return facts


def _only_tensors(variable: Any, path: str, gradients: dict[str, Any]) -> Any:
    """Return a variable's nesting with the gradients in place of its tensors, and None elsewhere."""
    described = describe(variable, path, lambda _, place: _Place(gradients.get(place or "0")))
    return _without_values(described)


class _Place:
    def __init__(self, content: Any) -> None:
        self.content = content


def _without_values(described: Any) -> Any:
    if isinstance(described, _Place):
        return described.content
    if isinstance(described, list):
        return [_without_values(item) for item in described]
    if isinstance(described, dict) and not ("type" in described and "value" in described):
        return {key: _without_values(item) for key, item in described.items()}
    return None


class _Gradient:
    def __init__(self, owner: SavedVariables, key: str, path: str) -> None:
        self.owner = owner
        self.key = key
        self.path = path

    def __call__(self, gradient: Tensor) -> None:
        self.owner.guard.run(PART, self.owner.take_gradient, self.key, self.path, gradient)
