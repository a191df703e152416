"""Ascend NPUs, by torch_npu, whose functions are looked up when they are used: a version may lack one."""

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from trainsentry.collectors.torch.device.device import Device, DeviceProperties, KernelLimits, OverflowFlag, installed
from trainsentry.collectors.torch.device.npu_faults import NpuFaults

PLAIN_FORMATS: Final = frozenset({-1, 0, 2, 30, 35, 47})
"""Of torch_npu's `Format`: undefined, NCHW, ND, NCDHW, NC, NCL. All others keep elements in blocks (NZ) or permuted."""

ND: Final = 2
"""The plain format that every tensor can be cast to."""

STATUS_WORDS: Final = 8
"""Numbers of the buffer that the status operations take; the first one tells."""

LARGEST_FLOAT16: Final = 65504.0

PARTS_OF_CANN: Final = ("CANN", "RUNTIME", "HCCL", "DRIVER")
"""Modules whose versions torch_npu reports."""


def torch_npu() -> Any:
    """Return the module torch_npu if the process has imported it whole, else None; never imports it."""
    module = sys.modules.get("torch_npu")
    return module if hasattr(module, "npu") else None  # an import that failed can leave half a module behind


class NpuOverflowFlag:
    """The overflow flag of an NPU in saturation mode, read and cleared through `torch_npu.npu.utils`."""

    def __init__(self, tools: Any) -> None:
        self._tools = tools

    def clear(self) -> None:
        """Clear the flag."""
        self._tools.clear_npu_overflow_flag()

    def is_set(self) -> bool:
        """Whether an operation has overflowed since the last `clear`; waits for the device."""
        return bool(self._tools.get_npu_overflow_flag())

    def set(self) -> None:
        """Set the flag again, by an operation that overflows: there is no other way."""
        torch.full((1,), LARGEST_FLOAT16, dtype=torch.float16, device="npu").mul_(2.0)


class NpuKernelDump:
    """CANN's dump of kernels, switched through `torch_npu.npu`; the order of calls is that of msprobe's kernel dump."""

    def __init__(self, npu: Any) -> None:
        self._npu = npu

    def begin(self, configuration: Path) -> None:
        """Have all kernels from here on dumped as an acl configuration says; waits for the current device.

        Raises:
            RuntimeError: when CANN refuses; nothing is switched on then.

        """
        self._npu.synchronize()
        self._npu.init_dump()
        try:
            self._npu.set_dump(str(configuration))
            self._npu.synchronize()
        except BaseException:
            self._npu.finalize_dump()
            raise

    def end(self) -> None:
        """Wait for the current device, and have no further kernels dumped."""
        try:
            self._npu.synchronize()
        finally:
            self._npu.finalize_dump()
        self._npu.synchronize()


class Npu(Device):
    """An Ascend NPU: without float64, with private formats, and on older chips with saturating arithmetic."""

    collectives = "hccl"
    graph_class = "NPUGraph"
    triton_package = "triton-ascend"
    needs = "install the torch_npu for this torch, and source CANN's set_env.sh"

    def __init__(self) -> None:
        super().__init__("npu", has_float64=False)
        self._faults = NpuFaults()

    def is_available(self) -> bool:
        """Whether torch_npu is imported and finds a device."""
        return torch_npu() is not None and super().is_available()

    def is_in_use(self) -> bool:
        """Whether this process has started an NPU."""
        return torch_npu() is not None and super().is_in_use()

    def properties(self, device: torch.device) -> DeviceProperties:
        """Return name, memory and the number of vector cores."""
        found = self.module.get_device_properties(device)
        cores = getattr(found, "vector_core_num", 0)
        name = str(getattr(found, "name", ""))
        return DeviceProperties(name, int(getattr(found, "total_memory", 0)), int(cores), name)

    def versions(self) -> dict[str, str]:
        """Return the versions of torch_npu and of the parts of CANN."""
        module = torch_npu()
        if module is None:
            return {}
        found = {"torch_npu": str(module.__version__)}
        for part in PARTS_OF_CANN:
            with contextlib.suppress(Exception):  # an older CANN knows fewer parts, an older torch_npu none
                found[part] = str(module.npu.utils.get_cann_version(part))
        return {name: version for name, version in found.items() if version}

    # ------------------------------------------------------------------ formats

    def has_plain_format(self, x: Tensor) -> bool:
        """Whether a tensor is in none of the NPU's private formats (NZ and others), where strides mean nothing."""
        module = torch_npu()
        return not hasattr(module, "get_npu_format") or int(module.get_npu_format(x)) in PLAIN_FORMATS

    def in_plain_format(self, x: Tensor) -> Tensor:
        """Return the tensor itself, or a copy in ND for one in a private format."""
        if self.has_plain_format(x):
            return x
        plain: Tensor = torch_npu().npu_format_cast(x, ND)
        return plain

    # ------------------------------------------------------------------ kernels

    def has_triton(self) -> bool:
        """Whether triton-ascend is installed: other Triton packages do not compile for NPUs."""
        found = installed("triton")
        folders = found.submodule_search_locations if found is not None else None
        return any((Path(folder) / "backends" / "ascend").is_dir() for folder in folders or ())

    @property
    def kernel_limits(self) -> KernelLimits:
        """32-byte blocks, 65,535 programs, and half of the 192 kB of a vector core's memory: the other half buffers."""
        return KernelLimits(alignment=32, most_programs=65_535, most_tile_bytes=96 * 1024)

    # ------------------------------------------------------------------ overflow and faults

    def overflow_flag(self) -> OverflowFlag | None:
        """Return the flag in saturation mode, None in INF/NAN mode, where reading it raises.

        Asking for the mode starts a device, so without one in use there is no flag.
        """
        if not self.is_in_use():
            return None
        tools = torch_npu().npu.utils
        return None if tools.is_support_inf_nan() else NpuOverflowFlag(tools)

    def overflow_status(self, device: torch.device) -> Tensor | None:
        """Return the flag's state as a number on the device, and clear it; None in INF/NAN mode."""
        if self.overflow_flag() is None:
            return None
        module = torch_npu()
        status: Tensor = module.npu_get_float_status(torch.zeros(STATUS_WORDS, device=device))[0].clone()
        module.npu_clear_float_status(torch.zeros(STATUS_WORDS, device=device))
        return status

    def kernel_dump(self) -> NpuKernelDump | None:
        """Return the switch of CANN's dump of kernels; None without a device, or a torch_npu that has it."""
        if not self.is_available():
            return None
        npu = torch_npu().npu
        known = all(hasattr(npu, name) for name in ("init_dump", "set_dump", "finalize_dump"))
        return NpuKernelDump(npu) if known else None

    def faults(self) -> Mapping[str, int]:
        """Return the findings of the silent-data check, and the faults of memory, since the first call."""
        return self._faults.counts(torch_npu().npu) if self.is_in_use() else super().faults()

    def make_deterministic(self) -> None:
        """Choose deterministic collectives; the variables are read when a group is made."""
        for name in ("HCCL_DETERMINISTIC", "LCCL_DETERMINISTIC"):
            os.environ[name] = "true"


NPU: Final = Npu()
