"""Captures whole tensors of chosen modules for a targeted dump."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from trainsentry.collectors.calls.call_selection import CallSelection
from trainsentry.collectors.calls.dump_entries import DumpedTensorPlace, EntryWriter
from trainsentry.collectors.guard import Guard
from trainsentry.collectors.torch.calls.call_names import CallNames
from trainsentry.collectors.torch.calls.call_watcher import CallWatcher
from trainsentry.collectors.torch.calls.dump_task import DumpTask
from trainsentry.collectors.torch.calls.overflow_task import OverflowTask, nonfinite
from trainsentry.collectors.torch.calls.tensor_facts import TensorFacts
from trainsentry.collectors.torch.calls.watch_modules import stem_of
from trainsentry.collectors.torch.device.registry import DeviceOverflowFlags
from trainsentry.collectors.torch.hooks.last_batches import LastBatches
from trainsentry.collectors.torch.hooks.nested_tensors import tensors_in
from trainsentry.collectors.torch.parameters.gradient_reader import gradient_of
from trainsentry.collectors.torch.parameters.readers import state_of
from trainsentry.collectors.torch.sharding.model_names import ModelNames

PART = "dump"


class TensorCapture:
    """Finds the tensors of chosen modules, now or in the coming forward and backward pass."""

    framework = "pytorch"

    def __init__(self, names: ModelNames, guard: Guard, *, checksum: bool = False) -> None:
        self.names = names
        self.guard = guard
        self.facts = TensorFacts(checksum=checksum)
        self.batches: LastBatches | None = None
        self._watcher: CallWatcher | None = None
        self._checker: CallWatcher | None = None

    @property
    def attached(self) -> bool:
        """Whether calls are watched."""
        return self._watcher is not None or self._checker is not None

    def model_tensors(self, modules: Collection[str], optimizers: Sequence[Optimizer]) -> Iterator[DumpedTensorPlace]:
        """Yield the current weights, gradients and optimizer state of the named modules' own parameters."""
        by_name = {m.name: m for m in self.names.modules}
        for named in self.names.parameters:
            if named.module not in modules:
                continue
            holder = named.module
            while holder and holder not in by_name:  # some hold parameters under names that are no module's
                holder = holder.rpartition(".")[0]
            if holder not in by_name:
                continue
            stem = stem_of(by_name[holder])
            yield DumpedTensorPlace(f"{stem}.forward.0", "parameters", named.leaf, named.part_of(named.parameter))
            taken = gradient_of(named.parameter)
            if taken is not None:
                gradient = named.part_of(taken)
                yield DumpedTensorPlace(f"{stem}.parameters_grad.0", "parameters_grad", named.leaf, gradient)
            for optimizer in optimizers:
                for path, tensor in tensors_in(state_of(optimizer).get(named.parameter, {})):
                    key = f"{named.leaf}.{path}"
                    like = tensor.numel() == named.parameter.numel()
                    part = named.part_of(tensor) if like else tensor
                    yield DumpedTensorPlace(f"{stem}.optimizer_state.0", "optimizer_state", key, part)

    def inputs(self, steps_back: int = 0) -> list[DumpedTensorPlace]:
        """Return the model's inputs of the step that was so many steps ago, if they are still there."""
        roots = [m for m in self.names.modules if not m.name]
        return self.batches.places(steps_back, stem_of(roots[0])) if self.batches is not None and roots else []

    def describe(self, tensor: Tensor) -> dict[str, Any]:
        """Return the description of a tensor for a dump."""
        facts = self.facts.describe(tensor)
        self.facts.settle()
        return facts

    def attach(self, modules: Collection[str], writer: EntryWriter, may_save: Callable[[str, Tensor], bool]) -> None:
        """Write the calls of the named modules, and of modules and operations inside them, forward and backward."""
        inside = tuple(f"{name}." if name else "" for name in modules)
        named = [m for m in self.names.modules if f"{m.name}.".startswith(inside)]
        stems = tuple(f"{stem_of(m)}." for m in named if m.name in modules)
        if not stems:
            return
        selection = CallSelection(level="mix", parts=stems)
        task = DumpTask(self.facts, selection, save=True, may_save=may_save)
        task.writer = writer
        self._watcher = CallWatcher(self.guard, task, selection, CallNames(), parameters=False, part=PART)
        self._watcher.start(named)

    def check_overflow(self, writer: EntryWriter) -> OverflowTask:
        """Write every call of the model that overflows, without its tensors; return the task that counts them."""
        task = OverflowTask(TensorFacts(), flags=DeviceOverflowFlags(), save=False)
        task.writer = writer
        selection = CallSelection(level="mix", risk="ALL")
        self._checker = CallWatcher(self.guard, task, selection, CallNames(), parameters=False, part=PART)
        self._checker.start([m for m in self.names.modules if m.name])
        return task

    def nonfinite_weights(self) -> list[str]:
        """Return the names of the model's parameters that hold NaN or Inf; waits for a device."""
        return nonfinite((p.name, p.parameter) for p in self.names.parameters)

    def close(self) -> None:
        """Stop watching calls."""
        for watcher in (self._watcher, self._checker):
            if watcher is not None:
                watcher.stop()
                watcher.reset()
        self._watcher = self._checker = None
