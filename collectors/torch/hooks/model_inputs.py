"""Reads the model's own inputs at every step, so that a loader which is stuck shows between the samples."""

import time
from collections.abc import Iterable

from torch import Tensor

from trainsentry.collectors.settings import LARGEST_INPUT
from trainsentry.collectors.shared.batch_rows import PART
from trainsentry.collectors.shared.forward_passes import ForwardPasses
from trainsentry.collectors.shared.model_graph import NamedModule
from trainsentry.collectors.torch.hooks.last_batches import LastBatches
from trainsentry.collectors.torch.rows.step_rows import StepRows


class ModelInputs:
    """Appends a row for each input of a root module; of a large one, for its first samples. `batches` keeps them.

    `first_pass_at` is when the step's first pass began, by `time.perf_counter`.

    `every_step` is whether that happens in all steps, and `reading` whether it does in this one; the whole of a large
    input is read with the other activations.
    """

    def __init__(self, rows: StepRows, *, every_step: bool) -> None:
        self.rows = rows
        self.every_step = every_step
        self.reading = every_step
        self.batches = LastBatches()
        self.first_pass_at: float | None = None

    def open_step(self, *, reading: bool) -> None:
        """Begin a step."""
        self.reading = reading
        self.first_pass_at = None
        self.batches.open_step()

    def read(
        self,
        named: NamedModule,
        tensors: Iterable[tuple[str, Tensor]],
        passes: ForwardPasses,
        *,
        only_large: bool = False,
    ) -> None:
        """Read the inputs of a pass; `only_large` leaves out those that are read whole anyway."""
        if not (self.every_step and self.reading):
            return
        if self.first_pass_at is None:
            self.first_pass_at = time.perf_counter()
        for path, tensor in tensors:
            self.batches.keep(f"input.{path}", passes.micro_step, tensor)
            large = tensor.numel() > LARGEST_INPUT
            if large:
                series_id = passes.series(named, "input", f"{path}.{PART}", 0, passes.micro_step, gradient=False)
                self.rows.add(series_id, first_part(tensor))
            elif not only_large:
                series_id = passes.series(named, "input", path, 0, passes.micro_step, gradient=False)
                self.rows.add_shared(series_id, tensor)


def first_part(tensor: Tensor) -> Tensor:
    """Return a view of the first elements of a large tensor, along its dimensions from the first one on.

    >>> import torch
    >>> first_part(torch.zeros(64, 3, 224, 224)).shape
    torch.Size([1, 1, 224, 224])
    """
    part = tensor.detach()
    for dim, size in enumerate(part.shape):
        if part.numel() <= LARGEST_INPUT:
            break
        part = part.narrow(dim, 0, max(1, LARGEST_INPUT * size // part.numel()))
    return part
