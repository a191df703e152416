"""The fused kernels on the simulated NPU: Triton's interpreter runs them on the host's side of its memory."""

from contextlib import contextmanager

import pytest
import torch
from triton import language as tl

from trainsentry.collectors.torch.device.npu import NPU
from trainsentry.collectors.torch.rows import device_rows
from trainsentry.collectors.torch.rows.kernels import triton_kernels

SHIFT = 1 << 62
"""What the simulated device adds to the addresses of its memory."""


WRITTEN = {"partial_rows": (5,), "combine_rows": (5,)}
"""The arguments that each kernel writes to."""

COUNTERS = 6
"""The argument that `partial_rows` also writes to where it counts histograms."""


class InterpretedKernels:
    """The kernels with host copies of the tables; `launches` has the names of all launches."""

    tl = tl
    PARTIAL_COLUMNS = triton_kernels.PARTIAL_COLUMNS

    def __init__(self):
        self.launches = []

    @property
    def partial_rows(self):
        return _Launcher(self, "partial_rows")

    @property
    def combine_rows(self):
        return _Launcher(self, "combine_rows")


class _Launcher:
    def __init__(self, kernels, name):
        self.kernels, self.name = kernels, name

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            self.kernels.launches.append(self.name)
            with _as_on_the_device():
                _run(getattr(triton_kernels, self.name)[grid], args, kwargs, WRITTEN[self.name])

        return launch


@contextmanager
def _as_on_the_device():
    """Let the host read the device here without its counting as waiting: a real kernel runs on the device."""
    mode = torch.ops.simulated_npu.get_sync_debug()
    torch.ops.simulated_npu.set_sync_debug(0)
    try:
        yield
    finally:
        torch.ops.simulated_npu.set_sync_debug(mode)


def _run(kernel, args, kwargs, written):
    on_host = [x.cpu() if isinstance(x, torch.Tensor) else x for x in args]
    if kwargs.get("many"):
        on_host[1] = on_host[1] - SHIFT
    kernel(*on_host, **kwargs)
    for place in (*written, COUNTERS) if kwargs.get("histograms") else written:
        args[place].copy_(on_host[place])


@contextmanager
def interpreted_kernels():
    """Read the simulated NPU's tensors by the fused kernels."""
    kernels = InterpretedKernels()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_rows, "kernels_for", lambda device: kernels if device.type == NPU.type else None)
        yield kernels
