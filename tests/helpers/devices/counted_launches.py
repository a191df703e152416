"""Rows of CPU tensors kept as on an accelerator, with kernels that only count, or Triton's interpreter."""

from contextlib import contextmanager

import pytest
from triton import language as tl

from trainsentry.collectors.torch import watch
from trainsentry.collectors.torch.rows import device_rows, step_rows


class CountingKernels:
    """Stands in for the Triton kernels: notes each launch's number of programs, and writes nothing."""

    tl = tl
    PARTIAL_COLUMNS = 16

    def __init__(self):
        self.partial = []
        self.combined = []

    @property
    def partial_rows(self):
        return _Kernel(self.partial)

    @property
    def combine_rows(self):
        return _Kernel(self.combined)

    @property
    def launches(self):
        return len(self.partial) + len(self.combined)


class _Kernel:
    def __init__(self, launched):
        self.launched = launched

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.launched.append(grid[0])


@contextmanager
def counted_launches():
    """Count the launches of every monitor that is made inside, whose rows are kept as on a device."""
    kernels = CountingKernels()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_rows, "kernels_for", lambda device: kernels)
        keep_rows_as_on_a_device(patch)
        yield kernels


def keep_rows_as_on_a_device(patch):
    """Make monitors keep the rows of CPU tensors in a buffer, as they do on an accelerator."""
    patch.setattr(watch, "StepRows", lambda *args: step_rows.StepRows(*args, device_rows_on_cpu=True))
