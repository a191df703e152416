"""CUDA and ROCm, which torch both calls cuda."""

import contextlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final

import torch

from trainsentry.collectors.torch.device.device import Device, installed

_NOTHING: Final = contextlib.nullcontext()


def _is_current(stream: Any) -> bool:
    """Whether work goes to a stream now: torch takes 10 µs to make objects of what these two numbers tell."""
    device = stream.device_index
    current: tuple[int, int] = torch._C._cuda_getDevice(), torch._C._cuda_getCurrentRawStream(device)
    return current == (device, stream.cuda_stream)


class Cuda(Device):
    """An NVIDIA or AMD GPU."""

    collectives = "nccl"
    graph_class = "CUDAGraph"
    needs = "install a CUDA or ROCm build of torch, and a driver"

    def _architecture(self, found: Any) -> str:
        return str(getattr(found, "gcnArchName", "")) or f"sm_{found.major}{found.minor}"

    def versions(self) -> dict[str, str]:
        """Return the versions of CUDA or ROCm, cuDNN and NCCL that torch was built with."""
        found = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
        if torch.backends.cudnn.is_available():
            found["cuDNN"] = str(torch.backends.cudnn.version())
        if torch.distributed.is_available() and torch.distributed.is_nccl_available():
            found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        return {name: version for name, version in found.items() if version}

    def stream_numbers(self, device: torch.device) -> Callable[[], int]:
        """Return a function that returns the address of the current stream's handle: torch makes no object of it."""
        return partial(torch._C._cuda_getCurrentRawStream, device.index)

    def guard(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return a context in which `device` is the current one; one that does nothing where it is already."""
        return _NOTHING if torch._C._cuda_getDevice() == device.index else super().guard(device)

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which `stream` is the current one; one that does nothing where it is already."""
        return _NOTHING if _is_current(stream) else super().on_stream(stream)

    def follow(self, earlier: Any, device: torch.device) -> Any:
        """Let the current stream wait for all work of `earlier`; return the current one, `earlier` where it is that."""
        return earlier if earlier is not None and _is_current(earlier) else super().follow(earlier, device)

    def has_triton(self) -> bool:
        """Whether Triton is installed."""
        return installed("triton") is not None

    def make_deterministic(self) -> None:
        """Choose the deterministic algorithms of cuBLAS (read when it starts), and no cuDNN, as msprobe does."""
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.enabled = False

    def kernel_settings(self) -> tuple[Any, ...]:
        """Return the choices of cuDNN's and cuBLAS's kernels; None for one that this torch does not tell."""
        cudnn, core = torch.backends.cudnn, torch._C  # cuBLAS's have two interfaces, of which each may refuse
        found: list[Any] = [cudnn.enabled, cudnn.benchmark, cudnn.deterministic]
        for name, args in (
            ("_get_cublas_allow_tf32", ()),
            ("_get_cudnn_allow_tf32", ()),
            ("_get_fp32_precision_getter", ("cuda", "matmul")),
            ("_get_fp32_precision_getter", ("cuda", "conv")),
            ("_get_cublas_allow_fp16_reduced_precision_reduction", ()),
            ("_get_cublas_allow_bf16_reduced_precision_reduction", ()),
        ):
            try:
                found.append(getattr(core, name)(*args))
            except (AttributeError, RuntimeError):
                found.append(None)
        return tuple(found)


CUDA: Final = Cuda("cuda")
