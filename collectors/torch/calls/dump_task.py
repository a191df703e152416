"""Records what calls take and give: statistics, whole tensors, or only that they were made."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainsentry.collectors.calls.call import Call
from trainsentry.collectors.calls.call_selection import CallSelection
from trainsentry.collectors.calls.dump_entries import EntryWriter
from trainsentry.collectors.torch.calls.tensor_facts import TensorFacts
from trainsentry.collectors.torch.calls.values import describe
from trainsentry.collectors.torch.rows.local_tensor import is_readable, local
from trainsentry.collectors.torch.saving import SUFFIX, save_again, save_tensor


class DumpTask:
    """Describes each call to a writer: with `save` its tensors are written to files, without `values` nothing is read.

    With `later` the statistics of tensors on a device, and the tensors themselves, are kept there until `flush`.
    `may_save(file_name, tensor)` is asked before a file is written.
    """

    def __init__(
        self,
        facts: TensorFacts,
        selection: CallSelection,
        *,
        save: bool = False,
        values: bool = True,
        later: bool = False,
        may_save: Callable[[str, Tensor], bool] | None = None,
    ) -> None:
        self.facts = facts
        self.selection = selection
        self.save = save
        self.values = values
        self.later = later
        self.may_save = may_save
        self.writer: EntryWriter | None = None
        self._entries: list[tuple[str, dict[str, Any]]] = []
        self._tensors: list[tuple[Tensor, Path]] = []

    def before(self, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Take the inputs, as they are before the call."""
        content: dict[str, Any] = {}
        if self.values and "input" in self.selection.sides:
            stem = f"{call.name()}.input."
            content["input_args"] = self._describe(list(args), stem)
            content["input_kwargs"] = self._describe(dict(kwargs), stem)
        call.state = content

    def after(self, call: Call, output: Any, module: nn.Module | None) -> None:
        """Take the outputs, and the parameters of a module."""
        if not self.values:
            return
        content, call.state = call.state, None
        name = call.name()
        if "output" in self.selection.sides:
            given = output if isinstance(output, tuple) else (output,)
            content["output"] = self._describe(list(given), f"{name}.output.")
        if module is not None and "input" in self.selection.sides:
            parameters = dict(module.named_parameters(recurse=False))
            content["parameters"] = self._describe(parameters, f"{name}.parameters.")
        if call.recomputed:
            content["is_recompute"] = True
        self._emit(name, content)

    def gradient_arrived(self, call: Call, place: int, gradient: Tensor) -> Any:
        """Return the description of a gradient at an output of the call, which the backward pass may change later."""
        if not self.values or "input" not in self.selection.sides:
            return None
        return self._take(gradient, f"{call.name('backward')}.input.{place}")

    def gradients(self, call: Call, inputs: Sequence[Any], outputs: Sequence[Tensor | None]) -> None:
        """Take what a backward pass takes (gradients at the call's outputs) and gives (those at its inputs)."""
        if not self.values:
            return
        name, content = call.name("backward"), {}
        if "input" in self.selection.sides:
            content["input"] = list(inputs)
        if "output" in self.selection.sides:
            content["output"] = self._describe(list(outputs), f"{name}.output.")
        self._emit(name, content)

    def parameter_gradients(self, name: str, gradients: Mapping[str, Tensor]) -> None:
        """Take the gradients that a backward pass has given to the parameters of a module."""
        if self.values:
            self._emit(name, {p: [self._take(g, f"{name}.{p}")] for p, g in gradients.items()})

    def forget(self) -> None:
        """Read tensors anew from here on."""
        self.facts.forget()

    def flush(self) -> None:
        """Write what was kept for later."""
        self.facts.settle()
        entries, self._entries = self._entries, []
        tensors, self._tensors = self._tensors, []
        for tensor, path in tensors:
            save_tensor(tensor, path)
        for name, content in entries:
            if self.writer is not None:
                self.writer.entry(name, content)

    def _emit(self, name: str, content: dict[str, Any]) -> None:
        self._entries.append((name, content))
        if not self.later:
            self.flush()

    def _describe(self, value: Any, stem: str) -> Any:
        return describe(value, "", lambda tensor, path: self._take(tensor, f"{stem}{path}"))

    def _take(self, tensor: Tensor, stem: str) -> dict[str, Any]:
        facts = self.facts.describe(tensor)
        if self.save and self.writer is not None and _can_be_saved(tensor):
            path = self._save(tensor, f"{stem}{SUFFIX}")
            if path is not None:
                facts["data_name"] = path.name
        return facts

    def _save(self, tensor: Tensor, name: str) -> Path | None:
        """Write a tensor's file, or give the one that holds the same tensor another name; None when it may not be."""
        assert self.writer is not None
        if self.later:
            path = self.writer.tensor_path(name)
            self._tensors.append((local(tensor).clone(), path))
            return path
        known = self.facts.file_of(tensor)
        if known is None and self.may_save is not None and not self.may_save(name, tensor):
            return None
        path = self.writer.tensor_path(name)
        if known is None:
            save_tensor(tensor, path)
            self.facts.note_file(tensor, path)
        else:
            save_again(known, path, tensor)
        return path


def _can_be_saved(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and is_readable(local(tensor))
