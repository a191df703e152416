"""Reads the model's own inputs at every step, and keeps those of the last steps for a look at their rows."""

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from mindspore import Tensor

from trainsentry.collectors.calls.dump_entries import DumpedTensorPlace
from trainsentry.collectors.mindspore.rows.step_rows import StepRows
from trainsentry.collectors.mindspore.rows.tensor_statistics import array_of, row_of
from trainsentry.collectors.mindspore.runtime import wait
from trainsentry.collectors.settings import LARGEST_INPUT
from trainsentry.collectors.shared.batch_rows import (
    DEVICE_BYTES,
    KEPT_BYTES,
    KEPT_STEPS,
    InputRows,
    rows_of_array,
)
from trainsentry.collectors.shared.model_inputs import ModelInputs


@dataclass(frozen=True, slots=True)
class KeptInput:
    """One input of one pass, with the statistics of what is read of it; None on a device, where nothing waits."""

    name: str
    micro_step: int
    tensor: Tensor
    row: npt.NDArray[np.float64] | None

    @property
    def is_unchanged(self) -> bool:
        """Whether it has the statistics that it had; a MindSpore tensor does not count its changes."""
        return self.row is None or np.array_equal(row_of(first_part(self.tensor), 0.0), self.row, equal_nan=True)


class LastBatches:
    """The inputs of this step and of those before it, by reference and within `most_bytes`; older steps go first."""

    def __init__(self, most_bytes: int = KEPT_BYTES) -> None:
        self._most_bytes = most_bytes
        self.clear()

    def clear(self) -> None:
        """Forget all."""
        self._steps: deque[list[KeptInput]] = deque([[]])

    def open_step(self) -> None:
        """Begin a step."""
        if len(self._steps) == KEPT_STEPS:
            self._steps.pop()
        self._steps.appendleft([])

    def keep(self, kept: KeptInput) -> None:
        """Keep an input of this step, where there is room for it."""
        self._steps[0].append(kept)
        held = sum(k.tensor.nbytes for step in self._steps for k in step)
        for step in reversed(self._steps):
            if held <= self._most_bytes:
                return
            held -= sum(k.tensor.nbytes for k in step)
            step.clear()

    def of(self, steps_back: int) -> list[KeptInput]:
        """Return the inputs of the step that was so many steps ago, those that were overwritten left out."""
        known = 0 <= steps_back < len(self._steps)
        return [kept for kept in self._steps[steps_back] if kept.is_unchanged] if known else []

    def rows(self, steps_back: int) -> list[InputRows]:
        """Return what is known of the rows of such a step's inputs; this waits for a device."""
        arrays = [(kept, array_of(kept.tensor)) for kept in self.of(steps_back)]
        found = [(kept, array.dtype.kind == "f", rows_of_array(array)) for kept, array in arrays]
        return [InputRows(k.name, k.micro_step, rows[1], floating, rows[0]) for k, floating, rows in found if rows]

    def places(self, steps_back: int, stem: str) -> list[DumpedTensorPlace]:
        """Return such a step's inputs for a dump; `stem` is that of the model."""
        kept = [k for k in self.of(steps_back) if not k.micro_step]
        return [DumpedTensorPlace(f"{stem}.forward.0", "input_args", k.name, k.tensor) for k in kept]


class CellInputs(ModelInputs):
    """The inputs of a MindSpore model."""

    def __init__(self, rows: StepRows, *, every_step: bool) -> None:
        super().__init__(LastBatches(DEVICE_BYTES if rows.on_device else KEPT_BYTES), every_step=every_step)
        self.rows = rows

    def _part_of(self, tensor: Tensor) -> Tensor:
        part = first_part(tensor)
        if part is not tensor and not self.rows.on_device:
            wait()  # for the slice, which is an operation
        return part

    def _keep(self, name: str, micro_step: int, tensor: Tensor, part: Tensor) -> None:
        row = None if self.rows.on_device else row_of(part, 0.0)
        self.batches.keep(KeptInput(name, micro_step, tensor, row))

    def _append(self, series_id: int, part: Tensor, is_part: bool) -> None:
        self.rows.add(series_id, part)


def first_part(tensor: Tensor) -> Tensor:
    """Return the first elements of a large tensor, along its dimensions from the first one on."""
    part = tensor
    for dim, size in enumerate(tensor.shape):
        if part.size <= LARGEST_INPUT:
            break
        kept = max(1, LARGEST_INPUT * size // part.size)
        part = part[(slice(None),) * dim + (slice(0, kept),)]
    return part
