"""Keeps the model's inputs of the last steps by reference, so that trouble can be traced to the rows of a batch."""

from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainsentry.collectors.calls.dump_entries import DumpedTensorPlace
from trainsentry.collectors.shared.batch_rows import InputRows
from trainsentry.collectors.torch.device.registry import device_of
from trainsentry.collectors.torch.rows.local_tensor import local, version_of

KEPT_STEPS: Final = 4
"""Steps whose inputs are kept: an incident is known one or two steps after its own, on a busy machine some more."""

HOST_BYTES: Final = 64 * 2**20
DEVICE_BYTES: Final = 16 * 2**20
"""Most memory that kept inputs hold, on the host and on devices together; older steps go first."""

MOST_ELEMENTS: Final = 2**24
"""Elements of an input that are looked at, 0.1 s of a core; of a larger one the beginning of each row."""


@dataclass(frozen=True, slots=True)
class KeptInput:
    """One input of one pass, with its version when the model took it."""

    name: str
    micro_step: int
    tensor: Tensor
    version: int | None

    @property
    def is_unchanged(self) -> bool:
        """Whether nothing was written to it since."""
        return self.version is not None and version_of(self.tensor) == self.version


class LastBatches:
    """The inputs of this step and of those before it."""

    def __init__(self) -> None:
        self._steps: deque[list[KeptInput]] = deque([[]], maxlen=KEPT_STEPS)

    def open_step(self) -> None:
        """Begin a step."""
        self._steps.appendleft([])

    def keep(self, name: str, micro_step: int, tensor: Tensor) -> None:
        """Keep an input of this step, where there is room for it."""
        tensor = tensor.detach()  # the graph before the model is not kept alive
        self._steps[0].append(KeptInput(name, micro_step, tensor, version_of(tensor)))
        while self._is_full():
            if len(self._steps) > 1 and any(list(self._steps)[1:]):
                self._drop_oldest()
            else:
                self._steps[0].pop()

    def of(self, steps_back: int) -> list[KeptInput]:
        """Return the inputs of the step that was so many steps ago, those that were overwritten left out."""
        if not 0 <= steps_back < len(self._steps):
            return []
        return [kept for kept in self._steps[steps_back] if kept.is_unchanged]

    def rows(self, steps_back: int) -> list[InputRows]:
        """Return what is known of the rows of such a step's inputs; this waits for a device."""
        found = [(kept, rows_of(kept.tensor)) for kept in self.of(steps_back)]
        return [
            InputRows(kept.name, kept.micro_step, kept.tensor[0].numel(), kept.tensor.is_floating_point(), rows)
            for kept, rows in found
            if rows is not None
        ]

    def places(self, steps_back: int, stem: str) -> list[DumpedTensorPlace]:
        """Return such a step's inputs for a dump; `stem` is that of the model."""
        kept = [k for k in self.of(steps_back) if not k.micro_step]
        return [DumpedTensorPlace(f"{stem}.forward.0", "input_args", k.name, k.tensor) for k in kept]

    def clear(self) -> None:
        """Forget all."""
        self._steps = deque([[]], maxlen=KEPT_STEPS)

    def _is_full(self) -> bool:
        used = {True: 0, False: 0}
        for kept in {id(k.tensor): k for step in self._steps for k in step}.values():
            used[device_of(kept.tensor).on_host] += kept.tensor.numel() * kept.tensor.element_size()
        return used[True] > HOST_BYTES or used[False] > DEVICE_BYTES

    def _drop_oldest(self) -> None:
        for step in reversed(self._steps):
            if step:
                step.clear()
                return


def rows_of(tensor: Tensor) -> npt.NDArray[np.float64] | None:
    """Return of each row the number of values that are not finite, min, max, mean and root mean square of the rest.

    Shape (rows, 5); None for a tensor without rows.
    """
    with torch.no_grad():
        x = local(tensor)
        if x.dim() < 1 or not x.numel() or x.layout is not torch.strided or x.is_quantized:
            return None
        flat = (x.abs() if x.is_complex() else x).reshape(x.shape[0], -1)
        flat = flat[:, : max(1, MOST_ELEMENTS // flat.shape[0])].to(device_of(x).wide_dtype(torch.float64))
        finite = flat.isfinite()
        count = finite.sum(1)
        kept = torch.where(finite, flat, 0.0)
        low = torch.where(finite, flat, torch.inf).amin(1)
        high = torch.where(finite, flat, -torch.inf).amax(1)
        mean = kept.sum(1) / count
        root = (kept.square().sum(1) / count).sqrt()
        return torch.stack((flat.shape[1] - count, low, high, mean, root), 1).double().cpu().numpy()
