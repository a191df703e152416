"""Keeps the model's inputs of the last steps by reference, so that trouble can be traced to the rows of a batch."""

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainsentry.collectors.calls.dump_entries import DumpedTensorPlace
from trainsentry.collectors.shared.batch_rows import DEVICE_BYTES, KEPT_BYTES, KEPT_STEPS, MOST_ELEMENTS, InputRows
from trainsentry.collectors.torch.device.registry import device_of
from trainsentry.collectors.torch.rows.local_tensor import local, version_of


@dataclass(frozen=True, slots=True)
class KeptInput:
    """One input of one pass, with its version when the model took it, and the bytes of memory that it holds."""

    name: str
    micro_step: int
    tensor: Tensor
    version: int | None
    on_host: bool
    held: int

    @property
    def is_unchanged(self) -> bool:
        """Whether nothing was written to it since."""
        return self.version is not None and version_of(self.tensor) == self.version


class LastBatches:
    """The inputs of this step and of those before it."""

    def __init__(self) -> None:
        self._steps: deque[list[KeptInput]] = deque([[]])
        self._held = {True: 0, False: 0}

    def open_step(self) -> None:
        """Begin a step."""
        if len(self._steps) == KEPT_STEPS:
            self._drop(self._steps.pop())
        self._steps.appendleft([])

    def keep(self, name: str, micro_step: int, tensor: Tensor) -> None:
        """Keep an input of this step, where there is room for it."""
        if tensor.grad_fn is not None:
            tensor = tensor.detach()  # the graph before the model is not kept alive
        kept = KeptInput(name, micro_step, tensor, version_of(tensor), *_memory_of(tensor))
        self._steps[0].append(kept)
        self._held[kept.on_host] += kept.held
        for step in reversed(self._steps):
            if not self._is_full():
                return
            self._drop(step)

    def of(self, steps_back: int) -> list[KeptInput]:
        """Return the inputs of the step that was so many steps ago, those that were overwritten left out."""
        if not 0 <= steps_back < len(self._steps):
            return []
        return [kept for kept in self._steps[steps_back] if kept.is_unchanged]

    def rows(self, steps_back: int) -> list[InputRows]:
        """Return what is known of the rows of such a step's inputs; this waits for a device."""
        found = [(kept, rows_of(kept.tensor)) for kept in self.of(steps_back)]
        return [
            InputRows(kept.name, kept.micro_step, rows[1], kept.tensor.is_floating_point(), rows[0])
            for kept, rows in found
            if rows is not None
        ]

    def places(self, steps_back: int, stem: str) -> list[DumpedTensorPlace]:
        """Return such a step's inputs for a dump; `stem` is that of the model."""
        kept = [k for k in self.of(steps_back) if not k.micro_step]
        return [DumpedTensorPlace(f"{stem}.forward.0", "input_args", k.name, k.tensor) for k in kept]

    def clear(self) -> None:
        """Forget all."""
        self._steps = deque([[]])
        self._held = {True: 0, False: 0}

    def _is_full(self) -> bool:
        return self._held[True] > KEPT_BYTES or self._held[False] > DEVICE_BYTES

    def _drop(self, step: list[KeptInput]) -> None:
        for kept in step:
            self._held[kept.on_host] -= kept.held
        step.clear()


def _memory_of(tensor: Tensor) -> tuple[bool, int]:
    """Return whether a tensor's part of this rank is in host memory, and the bytes that it keeps alive."""
    x = tensor if type(tensor) is Tensor else local(tensor)  # which is an operation
    try:
        held = x.untyped_storage().nbytes()  # a view keeps all of it
    except (NotImplementedError, RuntimeError):  # sparse tensors have none
        held = x.numel() * x.element_size()
    return device_of(x).on_host, held


def rows_of(tensor: Tensor) -> tuple[npt.NDArray[np.float64], int] | None:
    """Return numbers of each row, shape (rows, 5), and the elements of a row; None for a tensor without rows.

    The numbers: how many values are NaN or Inf (−Inf stands in masks by design), and min, max, mean and root mean
    square of the finite ones. Of a tensor that ranks share, the rows of this rank's part.
    """
    with torch.no_grad():
        x = local(tensor)
        if x.dim() < 1 or not x.numel() or x.layout is not torch.strided or x.is_quantized:
            return None
        flat = (x.abs() if x.is_complex() else x).reshape(x.shape[0], -1)
        elements = flat.shape[1]
        flat = flat[:, : max(1, MOST_ELEMENTS // flat.shape[0])].to(device_of(x).wide_dtype(torch.float64))
        finite = flat.isfinite()
        count = finite.sum(1)
        kept = torch.where(finite, flat, 0.0)
        low = torch.where(finite, flat, torch.inf).amin(1)
        high = torch.where(finite, flat, -torch.inf).amax(1)
        mean = kept.sum(1) / count
        root = (kept.square().sum(1) / count).sqrt()
        bad = (flat.isnan() | flat.isposinf()).sum(1)
        return torch.stack((bad, low, high, mean, root), 1).double().cpu().numpy(), elements
