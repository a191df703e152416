"""Reads the model's own inputs at every step, so that a loader which is stuck shows between the samples."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from trainsentry.collectors.shared.batch_rows import PART
from trainsentry.collectors.shared.forward_passes import ForwardPasses
from trainsentry.collectors.shared.model_graph import NamedModule


class ModelInputs:
    """Appends a row for each input of a root module; of a large one, for its first samples. `batches` keeps them.

    `first_pass_at` is when the step's first pass began, by `time.perf_counter`.

    `every_step` is whether that happens in all steps, and `reading` whether it does in this one; the whole of a large
    input is read with the other activations.
    """

    def __init__(self, batches: Any, *, every_step: bool) -> None:
        self.batches = batches
        self.every_step = every_step
        self.reading = every_step
        self.first_pass_at: float | None = None

    def open_step(self, *, reading: bool) -> None:
        """Begin a step."""
        self.reading = reading and self.every_step
        self.first_pass_at = None
        self.batches.open_step()

    def read(
        self,
        named: NamedModule,
        tensors: Iterable[tuple[str, Any]],
        passes: ForwardPasses,
        *,
        sampling: bool,
    ) -> None:
        """Read the inputs of a pass; while `sampling` activations, the small ones of a root are read whole anyway.

        Those of a module by which the passes begin, where the model itself is not called, have its name in theirs.
        """
        if not self.reading:
            return
        if self.first_pass_at is None:
            self.first_pass_at = time.perf_counter()
        given = list(tensors)
        self._note_pass(named, given)
        within = f"{named.name}." if named.name else ""
        if sampling and given and not passes.micro_step:
            self._note_repeated(f"input.{within}{given[0][0]}", [tensor for _, tensor in given])
        root = replace(named, name="") if within else named
        for path, tensor in ((within + path, tensor) for path, tensor in given):
            part = self._part_of(tensor)
            self._keep(f"input.{path}", passes.micro_step, tensor, part)
            large = part is not tensor
            if large or within or not sampling:
                name = f"{path}.{PART}" if large else path
                self._append(passes.series(root, "input", name, 0, passes.micro_step, gradient=False), part, large)

    def _part_of(self, tensor: Any) -> Any:
        """Return the first samples of a large tensor, and any other as it is."""
        raise NotImplementedError

    def _keep(self, name: str, micro_step: int, tensor: Any, part: Any) -> None:
        """Keep an input for a later look at its rows."""
        raise NotImplementedError

    def _note_pass(self, named: NamedModule, given: Sequence[tuple[str, Any]]) -> None:
        """Note that a pass through a root begins with these inputs; nothing where the framework's part does not."""

    def _note_repeated(self, name: str, tensors: Sequence[Any]) -> None:
        """Append the share of a batch's samples that are copies; nothing where the framework's part does not count."""

    def _append(self, series_id: int, part: Any, is_part: bool) -> None:
        """Append the row of an input, or of a part of one."""
        raise NotImplementedError
