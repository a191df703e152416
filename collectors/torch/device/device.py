"""Defines the interface of a type of device.

Each type is one file with one object, which overrides the methods where it differs from an accelerator as torch itself
describes all of them, and one line in `registry`.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol

import numpy.typing as npt
import torch
from torch import Tensor

from trainsentry.collectors.torch.device.copies import HostCopy, pinned_copy_to_device, pinned_copy_to_host


def installed(package: str) -> ModuleSpec | None:
    """Return where a package is installed, None where it is not or a script has a stand-in; imports nothing."""
    try:
        return find_spec(package)
    except ValueError:
        return None


NO_FAULTS: Final[Mapping[str, int]] = {}


@dataclass(frozen=True)
class DeviceProperties:
    """What a device says of itself; zeros and empty texts where it says nothing."""

    name: str = ""
    memory_bytes: int = 0
    processors: int = 0
    architecture: str = ""


@dataclass(frozen=True)
class MemoryUse:
    """Device memory of this process in bytes, as torch's allocator counts it, and the device's free memory."""

    allocated: int = 0
    peak: int = 0
    reserved: int = 0
    free: int = 0


@dataclass(frozen=True)
class KernelLimits:
    """What a Triton kernel must keep to on a type of device.

    `alignment`: bytes to which the address of a vector load must be aligned to be fast. `most_programs`: the largest
    launch. `most_tile_bytes`: bytes of one program's tiles, all live at once; 0 where registers decide.
    """

    alignment: int
    most_programs: int
    most_tile_bytes: int = 0


class OverflowFlag(Protocol):
    """The overflow flag of a device in saturation mode, where results stay finite."""

    def clear(self) -> None:
        """Clear the flag."""

    def is_set(self) -> bool:
        """Whether an operation has overflowed since the last `clear`; waits for the device."""

    def set(self) -> None:
        """Set the flag again, by an operation that overflows."""


class KernelDumpSwitch(Protocol):
    """Switches the dump of kernels that a device's own software writes; a process has one."""

    def begin(self, configuration: Path) -> None:
        """Have all kernels from here on dumped as a file says; waits for the device.

        Raises:
            RuntimeError: when the device's software refuses; nothing is switched on then.

        """

    def end(self) -> None:
        """Wait for the device, and have no further kernels dumped."""


class Device:
    """A type of device; the methods of this base class serve any accelerator that torch has a module for.

    `type` is that of `torch.device`. `has_float64` is False where float64 fails or silently becomes float32.
    `collectives` is the usual backend of `torch.distributed`. `graph_class` is the name of the class of captured graphs
    in the device's module, "" where torch has none. `triton_package` has a Triton that compiles for it; `needs` says
    what to install to use it. No method starts a device that the process does not use, unless its docstring says so.
    """

    collectives: str = "gloo"
    graph_class: str = ""
    triton_package: str = "triton"
    needs: str = "install its backend of torch"

    def __init__(self, device_type: str, *, has_float64: bool = True) -> None:
        self.type = device_type
        self.has_float64 = has_float64

    def __repr__(self) -> str:
        return f"<{self.type} devices>"

    # ------------------------------------------------------------------ what there is

    @property
    def module(self) -> Any:
        """The device's module of torch (`torch.<type>`), None where this torch has none."""
        return getattr(torch, self.type, None)

    @property
    def on_host(self) -> bool:
        """Whether tensors are in host memory, so that their values are read without waiting."""
        return False

    def is_available(self) -> bool:
        """Whether a device of this type can be used."""
        return self.module is not None and bool(self.module.is_available())

    def is_in_use(self) -> bool:
        """Whether this process has started the device; asking starts nothing."""
        module = self.module
        if module is None:
            return False
        is_initialized = getattr(module, "is_initialized", module.is_available)
        return bool(is_initialized())

    def devices(self) -> list[torch.device]:
        """Return all devices of this type, in the order of their numbers."""
        if not self.is_available():
            return []
        return [torch.device(self.type, i) for i in range(self.module.device_count())]

    def properties(self, device: torch.device) -> DeviceProperties:
        """Return name, memory, number of processors and architecture; starts the device."""
        found = self.module.get_device_properties(device)
        return DeviceProperties(
            name=str(getattr(found, "name", "")),
            memory_bytes=int(getattr(found, "total_memory", 0)),
            processors=int(getattr(found, "multi_processor_count", 0)),
            architecture=self._architecture(found),
        )

    def _architecture(self, found: Any) -> str:
        return str(getattr(found, "architecture", ""))

    def versions(self) -> dict[str, str]:
        """Return the versions of the software between torch and the device, by name."""
        return {}

    # ------------------------------------------------------------------ numbers

    @property
    def row_dtype(self) -> torch.dtype:
        """The dtype of rows of statistics: float64 where the device has it, else float32."""
        return torch.float64 if self.has_float64 else torch.float32

    def wide_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which values of `dtype` are summed: of `row_dtype`'s width, complex if they are."""
        if dtype.is_complex:
            return torch.complex128 if self.has_float64 else torch.complex64
        return self.row_dtype

    def has_plain_format(self, x: Tensor) -> bool:
        """Whether a tensor's elements lie in memory as its strides say, so that a kernel may read them there."""
        return True

    def in_plain_format(self, x: Tensor) -> Tensor:
        """Return a tensor with the same values whose elements lie in memory as its strides say; `x` is not changed."""
        return x

    # ------------------------------------------------------------------ streams

    def guard(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return a context in which `device` is the current one of its type."""
        guard: AbstractContextManager[Any] = self.module.device(device)
        return guard

    def make_current(self, device: torch.device) -> None:
        """Make `device` the current one of its type, for good: a rank's choice of its device."""
        self.module.set_device(device)

    def current_stream(self, device: torch.device) -> Any:
        """Return the current stream of a device, None where work runs at once."""
        return self.module.current_stream(device)

    def stream_numbers(self, device: torch.device) -> Callable[[], int]:
        """Return a function that returns the number of a device's current stream; it is asked for each tensor."""
        return lambda: int(torch._C._accelerator_getStream(device.index).stream_id)

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which `stream` is the current one."""
        context: AbstractContextManager[Any] = self.module.stream(stream)
        return context

    def keep_for_stream(self, tensors: Sequence[Tensor], stream: Any) -> None:
        """Keep the memory of tensors that are given up until a stream has done what it has been given so far."""
        with contextlib.suppress(NotImplementedError):  # a device with one stream alone
            for x in tensors:
                x.record_stream(stream)

    def follow(self, earlier: Any, device: torch.device) -> Any:
        """Let the device's current stream wait for all work of `earlier` (or None); return the current stream."""
        stream = self.current_stream(device)
        if earlier is not None and stream != earlier:
            stream.wait_stream(earlier)
        return stream

    def synchronize(self, device: torch.device) -> None:
        """Wait until a device has done all work."""
        self.module.synchronize(device)

    def copy_to_host(self, x: Tensor, into: Tensor | None = None) -> HostCopy:
        """Start a copy into pinned memory (`into`, to reuse it) on the current stream; return at once.

        Raises:
            RuntimeError: when no memory can be pinned.

        """
        with self.guard(x.device):
            return pinned_copy_to_host(x, into)

    def copy_to_device(self, values: npt.NDArray[Any], device: torch.device) -> Tensor:
        """Start a copy of an array to a device, through pinned memory; return the device's tensor at once."""
        return pinned_copy_to_device(values, device)

    # ------------------------------------------------------------------ captured graphs

    def is_capturing(self) -> bool:
        """Whether this thread's current stream is being captured."""
        if not self.is_in_use():
            return False
        is_capturing = getattr(self.module, "is_current_stream_capturing", None)
        return is_capturing is not None and bool(is_capturing())

    def graph_type(self) -> Any:
        """Return the class of captured graphs, with `capture_begin`, `capture_end` and `replay`; None without one."""
        return getattr(self.module, self.graph_class, None) if self.graph_class else None

    def capture_test(self) -> Callable[[], bool]:
        """Return what does as `is_capturing`, as quickly as torch lets it: it is asked for each tensor of a step."""
        if not self.is_in_use():
            return self.is_capturing
        return getattr(self.module, "is_current_stream_capturing", None) or bool

    # ------------------------------------------------------------------ kernels

    def has_triton(self) -> bool:
        """Whether an installed Triton compiles for this device; imports nothing."""
        return False

    @property
    def kernel_limits(self) -> KernelLimits:
        """What a Triton kernel must keep to."""
        return KernelLimits(alignment=16, most_programs=2**31 - 1)

    # ------------------------------------------------------------------ overflow and faults

    def overflow_flag(self) -> OverflowFlag | None:
        """Return the flag of a device that saturates; None where an overflow shows as Inf or NaN in the results."""
        return None

    def overflow_status(self, device: torch.device) -> Tensor | None:
        """Return a number of the device that is not 0 after an overflow, None where it does not saturate; no waiting.

        The flag is cleared once the number is read: a loss scaler that reads it too must have done so.
        """
        return None

    def kernel_dump(self) -> KernelDumpSwitch | None:
        """Return the switch of the dump of kernels, None where the device's software has none."""
        return None

    def faults(self) -> Mapping[str, int]:
        """Return how many hardware faults of each kind the device's own checks have found so far; never waits."""
        return NO_FAULTS

    # ------------------------------------------------------------------ random numbers

    def seed(self, seed: int) -> None:
        """Seed the generators of all devices of this type, where there are any."""
        if self.is_available():
            seed_all = getattr(self.module, "manual_seed_all", None) or self.module.manual_seed  # mps has one device
            seed_all(seed)

    def rng_states(self) -> list[Tensor]:
        """Return the states of the generators of all devices; empty when the process uses none. Waits for them."""
        if not self.is_in_use():
            return []
        get_all = getattr(self.module, "get_rng_state_all", None)
        return list(get_all()) if get_all is not None else [self.module.get_rng_state()]

    def rng_state(self) -> Tensor | None:
        """Return the state of the current device's generator; None where there is none to be read."""
        with contextlib.suppress(AttributeError, NotImplementedError, RuntimeError):
            if self.is_in_use():
                state: Tensor = self.module.get_rng_state()
                return state
        return None

    def restore_rng_states(self, states: Sequence[Tensor]) -> None:
        """Restore what `rng_states` returned."""
        if not states:
            return
        set_all = getattr(self.module, "set_rng_state_all", None)
        if set_all is not None:
            set_all(list(states))
        else:
            self.module.set_rng_state(states[0])

    def make_deterministic(self) -> None:
        """Set what this device needs beside `torch.use_deterministic_algorithms`."""

    def kernel_settings(self) -> tuple[Any, ...]:
        """Return the settings of torch that choose among this device's kernels; equal ones, equal kernels."""
        return ()

    # ------------------------------------------------------------------ memory

    def memory(self, device: torch.device) -> MemoryUse:
        """Return the memory in use; zeros where the process does not use the device."""
        if not self.is_in_use():
            return MemoryUse()
        module = self.module
        free = 0
        with contextlib.suppress(AttributeError, RuntimeError):
            free = int(module.mem_get_info(device)[0])
        return MemoryUse(
            allocated=int(module.memory_allocated(device)),
            peak=int(module.max_memory_allocated(device)),
            reserved=int(module.memory_reserved(device)),
            free=free,
        )
