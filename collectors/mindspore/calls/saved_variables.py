"""Writes variables that the user's script saves, at level debug."""

from collections import Counter
from typing import Any

from mindspore import Tensor

from trainsentry.collectors.calls.call import PART
from trainsentry.collectors.calls.dump_entries import VariableWriter
from trainsentry.collectors.guard import Guard
from trainsentry.collectors.mindspore.calls.tensor_facts import described, facts_of
from trainsentry.collectors.mindspore.runtime import wait
from trainsentry.collectors.mindspore.saving import SUFFIX, save_tensor


class SavedVariables:
    """Describes variables as `<name>.<n>.debug`.

    Gradients at them are not taken: a hook on a user's tensor is compiled along with the tensor.
    """

    def __init__(self, guard: Guard, *, task: str) -> None:
        self.guard = guard
        self.save_files = task == "tensor"
        self.writer: VariableWriter | None = None
        self._counts: Counter[str] = Counter()

    def begin(self, writer: VariableWriter) -> None:
        """Begin a step, whose variables go to `writer`."""
        self.writer = writer
        self._counts.clear()

    def save(self, variable: Any, name: str, save_backward: bool) -> None:
        """Write a variable."""
        if save_backward:
            self.guard.warn_once("save(save_backward)", "gradients at saved variables are not taken on MindSpore")
        wait()
        self.guard.run(PART, self._save, variable, name)

    def end_step(self) -> None:
        """Close the file."""
        writer, self.writer = self.writer, None
        if writer is not None:
            self.guard.run(PART, writer.close)

    close = end_step

    def _save(self, variable: Any, name: str) -> None:
        if self.writer is None:
            return
        key = f"{name}.{self._counts[name]}.debug"
        self._counts[name] += 1
        self.writer.entry(key, described(variable, "", lambda tensor, path: self._take(tensor, key, path)))

    def _take(self, tensor: Tensor, key: str, path: str) -> dict[str, Any]:
        facts = facts_of(tensor)
        if self.save_files and self.writer is not None:
            file = self.writer.tensor_path(f"{key}.{path or '0'}{SUFFIX}")
            save_tensor(tensor, file)
            facts["data_name"] = file.name
        return facts
