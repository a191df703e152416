"""Reads the inputs of a PyTorch model, and the first samples of a large one."""

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from trainsentry.collectors.series import PASSES_WITHOUT_GRADIENTS, REPEATED_SAMPLES, Series
from trainsentry.collectors.settings import LARGEST_INPUT
from trainsentry.collectors.shared.model_graph import NamedModule
from trainsentry.collectors.shared.model_inputs import ModelInputs
from trainsentry.collectors.torch.device.registry import stream_is_captured
from trainsentry.collectors.torch.hooks.active_modes import changes_operations
from trainsentry.collectors.torch.hooks.last_batches import LastBatches
from trainsentry.collectors.torch.hooks.repeated_rows import share_of_repeated
from trainsentry.collectors.torch.passes.pass_forms import PassForms
from trainsentry.collectors.torch.random_states import RandomStates
from trainsentry.collectors.torch.rows.local_tensor import is_readable
from trainsentry.collectors.torch.rows.step_rows import StepRows


class TorchInputs(ModelInputs):
    """The inputs of a PyTorch model; a whole one may be shared with its first module's."""

    def __init__(self, rows: StepRows, *, every_step: bool) -> None:
        super().__init__(LastBatches(), every_step=every_step)
        self.rows = rows
        self._random = RandomStates(rows)
        self._without_gradients: Counter[str] = Counter()
        self.forms = PassForms()

    def open_step(self, *, reading: bool) -> None:
        """Begin a step."""
        super().open_step(reading=reading)
        if self.reading and not changes_operations():
            self._random.open_step()
        self.forms.open_step()

    def note_without_gradients(self, named: NamedModule) -> None:
        """Note that a pass without gradients begins by a module: an evaluation, or a policy that acts."""
        self._without_gradients[named.name] += 1

    def _note_pass(self, named: NamedModule, given: Sequence[tuple[str, Tensor]]) -> None:
        if changes_operations():
            return
        if self._without_gradients:
            passes = self.rows.table.series_id(Series(PASSES_WITHOUT_GRADIENTS, PASSES_WITHOUT_GRADIENTS, scalar=True))
            self.rows.add_scalar(passes, float(max(self._without_gradients.values())))
            self._without_gradients.clear()
        if named.module.training:  # evaluations draw the same numbers each time, by design
            self.forms.note(named.name if not named.vpp_stage else f"stage {named.vpp_stage}", given)
            self._random.begin_pass()

    def _part_of(self, tensor: Tensor) -> Tensor:
        return first_part(tensor) if tensor.numel() > LARGEST_INPUT else tensor

    def _keep(self, name: str, micro_step: int, tensor: Tensor, part: Tensor) -> None:
        self.batches.keep(name, micro_step, tensor)

    def _note_repeated(self, name: str, tensors: Sequence[Tensor]) -> None:
        readable = all(type(x) is Tensor and is_readable(x) for x in tensors)
        if not readable or stream_is_captured() or changes_operations():
            return
        share = share_of_repeated(tensors)
        if share is not None:
            name = f"{REPEATED_SAMPLES}.{name}"
            self.rows.add_scalar(self.rows.table.series_id(Series(name, name, scalar=True)), share)

    def _append(self, series_id: int, part: Tensor, is_part: bool) -> None:
        (self.rows.add if is_part else self.rows.add_shared)(series_id, part)


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
