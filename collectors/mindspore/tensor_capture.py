"""Captures whole tensors of chosen cells for a targeted dump."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final

from mindspore import Tensor

from trainsentry.collectors.calls.dump_entries import DumpedTensorPlace, EntryWriter
from trainsentry.collectors.guard import Guard
from trainsentry.collectors.mindspore.calls.call_dump import CallDump, stem_of
from trainsentry.collectors.mindspore.calls.tensor_facts import facts_of, is_finite
from trainsentry.collectors.mindspore.hooks.model_inputs import LastBatches
from trainsentry.collectors.mindspore.hooks.optimizer_steps import OptimizerSteps
from trainsentry.collectors.mindspore.rows.cell_names import CellNames
from trainsentry.collectors.mindspore.rows.parameters import parameters_of, state_of

PART: Final = "dump"


class TensorCapture:
    """Finds the tensors of chosen cells, now or in the coming forward and backward pass."""

    framework = "mindspore"

    def __init__(self, names: CellNames, guard: Guard) -> None:
        self.names = names
        self.guard = guard
        self.steps: OptimizerSteps | None = None
        self.batches: LastBatches | None = None
        self._dumps: list[CallDump] = []

    @property
    def attached(self) -> bool:
        """Whether calls are watched."""
        return bool(self._dumps)

    def model_tensors(self, modules: Collection[str], optimizers: Sequence[Any]) -> Iterator[DumpedTensorPlace]:
        """Yield the current weights, gradients and optimizer state of the named cells' own parameters."""
        by_name = {m.name: m for m in self.names.modules}
        gradients = self.steps.gradients if self.steps is not None else ()
        for named in self.names.parameters:
            if named.module not in modules or named.module not in by_name:
                continue
            stem = stem_of(by_name[named.module])
            yield DumpedTensorPlace(f"{stem}.forward.0", "parameters", named.leaf, named.parameter)
            for optimizer in optimizers:
                place = next((i for i, p in enumerate(parameters_of(optimizer)) if p is named.parameter), None)
                if place is None:
                    continue
                if place < len(gradients) and isinstance(gradients[place], Tensor):
                    yield DumpedTensorPlace(
                        f"{stem}.parameters_grad.0", "parameters_grad", named.leaf, gradients[place]
                    )
                for quantity, tensors in state_of(optimizer):
                    yield DumpedTensorPlace(
                        f"{stem}.optimizer_state.0", "optimizer_state", f"{named.leaf}.{quantity}", tensors[place]
                    )

    def inputs(self, steps_back: int = 0) -> list[DumpedTensorPlace]:
        """Return the model's inputs of the step that was so many steps ago, if they are still there."""
        roots = [m for m in self.names.modules if not m.name]
        return self.batches.places(steps_back, stem_of(roots[0])) if self.batches is not None and roots else []

    def describe(self, tensor: Tensor) -> dict[str, Any]:
        """Return the description of a tensor for a dump."""
        return facts_of(tensor)

    def attach(self, modules: Collection[str], writer: EntryWriter, may_save: Callable[[str, Tensor], bool]) -> None:
        """Write the calls of the named cells and of cells inside them, forward and backward."""
        inside = tuple(f"{name}." if name else "" for name in modules)
        named = [m for m in self.names.modules if f"{m.name}.".startswith(inside)]
        if named:
            dump = CallDump(self.guard, PART, may_save=may_save)
            dump.writer = writer
            dump.start(named)
            self._dumps.append(dump)

    def check_overflow(self, writer: EntryWriter) -> CallDump:
        """Write every call of a cell that overflows, without its tensors; return the task that counts them."""
        dump = CallDump(self.guard, PART, save=False, only_overflows=True)
        dump.writer = writer
        dump.start([m for m in self.names.modules if m.name])
        self._dumps.append(dump)
        return dump

    def nonfinite_weights(self) -> list[str]:
        """Return the names of the model's parameters that hold NaN or Inf; waits for a device."""
        return [p.name for p in self.names.parameters if not is_finite(self.describe(p.parameter))]

    def close(self) -> None:
        """Stop watching calls."""
        for dump in self._dumps:
            dump.stop()
        self._dumps.clear()
