"""The host: its tensors are read in place, at once, and by any thread."""

import contextlib
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import numpy.typing as npt
import torch
from torch import Tensor

from trainsentry.collectors.torch.device.copies import HostCopy
from trainsentry.collectors.torch.device.device import Device, DeviceProperties, MemoryUse

_NOTHING: Final = contextlib.nullcontext()


class Cpu(Device):
    """The host; streams, guards, captures and pinned memory do not exist."""

    @property
    def on_host(self) -> bool:
        """Whether tensors are in host memory: yes."""
        return True

    def is_available(self) -> bool:
        """Whether it can be used: yes."""
        return True

    def is_in_use(self) -> bool:
        """Whether this process uses it: yes."""
        return True

    def devices(self) -> list[torch.device]:
        """Return the one device."""
        return [torch.device("cpu")]

    def properties(self, device: torch.device) -> DeviceProperties:
        """Return the processor's name, the machine's memory and its cores."""
        return DeviceProperties(
            name=_processor_name(),
            memory_bytes=_pages("SC_PHYS_PAGES"),
            processors=os.cpu_count() or 1,
            architecture=platform.machine(),
        )

    def guard(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return a context that does nothing."""
        return _NOTHING

    def make_current(self, device: torch.device) -> None:
        """Do nothing: there is one."""

    def current_stream(self, device: torch.device) -> Any:
        """Return None: work runs at once."""
        return None

    def stream_numbers(self, device: torch.device) -> Callable[[], int]:
        """Return a function that returns 0: there is no stream."""
        return int

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context that does nothing."""
        return _NOTHING

    def keep_for_stream(self, tensors: Sequence[Tensor], stream: Any) -> None:
        """Do nothing: work has run."""

    def follow(self, earlier: Any, device: torch.device) -> Any:
        """Return None: work runs at once."""
        return None

    def synchronize(self, device: torch.device) -> None:
        """Do nothing: work has run."""

    def copy_to_host(self, x: Tensor, into: Tensor | None = None) -> HostCopy:
        """Return a copy, which has arrived."""
        return HostCopy(x.clone() if into is None else into.copy_(x))

    def copy_to_device(self, values: npt.NDArray[Any], device: torch.device) -> Tensor:
        """Return a copy as a tensor."""
        return torch.from_numpy(values.copy())

    def memory(self, device: torch.device) -> MemoryUse:
        """Return the machine's free memory; torch counts nothing on the host."""
        return MemoryUse(free=_pages("SC_AVPHYS_PAGES"))

    def is_capturing(self) -> bool:
        """Whether a stream is captured: never."""
        return False

    def seed(self, seed: int) -> None:
        """Seed torch's generator, and with it those of all devices that torch knows."""
        torch.manual_seed(seed)

    def rng_states(self) -> list[Tensor]:
        """Return the state of torch's generator."""
        return [torch.get_rng_state()]

    def rng_state(self) -> Tensor | None:
        """Return the state of torch's generator."""
        return torch.get_rng_state()

    def restore_rng_states(self, states: Sequence[Tensor]) -> None:
        """Restore what `rng_states` returned."""
        torch.set_rng_state(states[0])


def _pages(name: str) -> int:
    """Return a number of pages in bytes, 0 where the system does not tell."""
    known = hasattr(os, "sysconf") and name in os.sysconf_names
    return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE") if known else 0


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


CPU: Final = Cpu("cpu")
