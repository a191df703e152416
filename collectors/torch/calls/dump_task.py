"""Records calls in a dump: statistics of their tensors, whole tensors, or only the calls themselves."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from trainsentry.collectors.calls.call import Call
from trainsentry.collectors.calls.call_selection import CallSelection
from trainsentry.collectors.calls.dump_entries import EntryWriter
from trainsentry.collectors.torch.calls.tensor_facts import TensorFacts
from trainsentry.collectors.torch.calls.tensor_files import TensorFiles
from trainsentry.collectors.torch.calls.values import describe
from trainsentry.collectors.torch.rows.local_tensor import is_readable, local
from trainsentry.collectors.torch.saving import SUFFIX, save_again, save_tensor

MOST_ENTRIES: Final = 4_096
"""Entries kept until the values of their tensors arrive (some 10 MB): then the host waits for the device once."""


class DumpTask:
    """Describes each call to a writer; `save` also writes its tensors to files, and without `values` no tensor is read.

    Statistics of tensors on a device are copied to the host at `flush`, or after `MOST_ENTRIES` calls; their files are
    written from copies while the step goes on. With `later` all entries are written at `flush`, and all files from
    copies. `may_save(file_name, tensor)` decides whether a file is written.
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
        self._files = TensorFiles()
        self._entries: list[tuple[str, dict[str, Any]]] = []

    def before(self, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Describe the inputs, before the call can change them."""
        content: dict[str, Any] = {}
        if self.values and "input" in self.selection.sides:
            stem = f"{call.name()}.input."
            content["input_args"] = self._describe(list(args), stem)
            content["input_kwargs"] = self._describe(dict(kwargs), stem)
        call.state = content

    def after(self, call: Call, output: Any, module: nn.Module | None) -> None:
        """Describe the outputs, and the parameters of a module."""
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
        """Return the description of a gradient at an output, before the backward pass can change it."""
        if not self.values or "input" not in self.selection.sides:
            return None
        return self._take(gradient, f"{call.name('backward')}.input.{place}")

    def gradients(self, call: Call, inputs: Sequence[Any], outputs: Sequence[Tensor | None]) -> None:
        """Describe a backward pass: its inputs (gradients at the call's outputs) and its outputs (at its inputs)."""
        if not self.values:
            return
        name, content = call.name("backward"), {}
        if "input" in self.selection.sides:
            content["input"] = list(inputs)
        if "output" in self.selection.sides:
            content["output"] = self._describe(list(outputs), f"{name}.output.")
        self._emit(name, content)

    def parameter_gradients(self, name: str, gradients: Mapping[str, Tensor]) -> None:
        """Describe the gradients of a module's parameters."""
        if self.values:
            self._emit(name, {p: [self._take(g, f"{name}.{p}")] for p, g in gradients.items()})

    def before_change(self, uncounted: Sequence[Tensor]) -> None:
        """Read what was described and not yet read."""
        self.facts.before_change(uncounted)

    def forget(self) -> None:
        """Forget what is known of tensors, so that each is read again."""
        self.facts.forget()

    def flush(self) -> None:
        """Write the entries that were kept, and wait until the files are written."""
        self._write_entries()
        self._files.drain()

    def _write_entries(self) -> None:
        self.facts.settle()
        entries, self._entries = self._entries, []
        for name, content in entries:
            if self.writer is not None:
                self.writer.entry(name, content)

    def _emit(self, name: str, content: dict[str, Any]) -> None:
        self._entries.append((name, content))
        if len(self._entries) >= MOST_ENTRIES or not (self.later or not self.facts.is_settled):
            self._write_entries()

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
        """Write a tensor's file, or link the file that already holds the same tensor; None when it may not be saved."""
        assert self.writer is not None
        known = self.facts.file_of(tensor)
        if known is None and self.may_save is not None and not self.may_save(name, tensor):
            return None
        path = self.writer.tensor_path(name)
        in_thread = self.later or not local(tensor).is_cpu
        if known is not None:
            (self._files.link if in_thread else save_again)(known, path)
            return path
        (self._files.write if in_thread else save_tensor)(tensor, path)
        self.facts.note_file(tensor, path)
        return path


def _can_be_saved(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and is_readable(local(tensor))
