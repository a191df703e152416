"""A simulated NPU in this process: torch's device "npu", `torch.npu` and `torch_npu`; its kernels run on the CPU.

`load()` changes the process for good: torch's PrivateUse1 has one name.
"""

import importlib
import sys

import torch

from .build import CannotBuild, built

__all__ = ["CannotBuild", "counter", "load", "saturating"]


def load():
    """Give this process two simulated NPUs.

    Raises:
        CannotBuild: where there is no C++ compiler, or it fails.

    """
    if hasattr(torch, "npu"):
        return
    torch.ops.load_library(str(built("device")))
    torch.utils.rename_privateuse1_backend("npu")
    from . import npu_module

    torch._register_device_module("npu", npu_module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    sys.modules["torch_npu"] = importlib.import_module(f"{__name__}.torch_npu")


def counter(name):
    """Return how often something has happened: kernels, host waits, copies to the host, pinned allocations."""
    return torch.ops.simulated_npu.counter(name)


class saturating:
    """Saturation mode: results stay finite, and the overflow flag tells."""

    def __enter__(self):
        torch.ops.simulated_npu.set_saturation(True)

    def __exit__(self, *_):
        torch.ops.simulated_npu.set_saturation(False)
