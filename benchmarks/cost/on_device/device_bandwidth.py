"""The bandwidth at which the monitor reads tensors on a device, as a share of a copy's.

Steps in which the training itself does nothing: one tensor passes through a module without operations, or an optimizer
that moves nothing steps over a list of weights. Whatever the device does then is the monitor's reading. Its bytes a
second are compared with those that a copy reads and writes.
"""

import tempfile
from dataclasses import dataclass
from typing import Any

import torch
from device_work import Work, free_memory, work_of
from torch import nn

MB = 2**20
KERNEL = "partial_rows"
PARTS = ("gradients", "parameters", "optimizer_state", "updates", "activations", "communication")


class Nothing(torch.optim.Optimizer):
    """Moves no weight."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Do nothing."""


class Passage(nn.Module):
    """Returns its input."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`."""
        return x


@dataclass(frozen=True)
class Bandwidth:
    """Bytes a second of the kernel that reads, of all kernels of a step, and of a copy; the launches of a step."""

    what: str
    dtype: str
    read: float
    whole: float
    copied: float
    launches: int

    @property
    def share(self) -> float:
        """Return the kernel's share of the copy's bandwidth."""
        return self.read / self.copied


def measure_bandwidth(device: torch.device, *, tiny: bool) -> list[Bandwidth]:
    """Return the bandwidths for one tensor and for lists; none where the device's time cannot be counted."""
    cases = [(1, 64), (1, 256), (1, 1024), (64, 16), (16, 64)] if not tiny else [(1, 1), (4, 1)]
    found = []
    for count, megabytes in cases:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            one = _measure(device, count, megabytes, dtype)
            if one is None:
                return []
            found.append(one)
            free_memory(device)
    return found


def _measure(device: torch.device, count: int, megabytes: int, dtype: torch.dtype) -> Bandwidth | None:
    size = megabytes * MB // dtype.itemsize
    tensors = [torch.randn(size, device=device).to(dtype) for _ in range(count)]
    other = [torch.empty_like(tensor) for tensor in tensors]
    volume = count * megabytes * MB

    def copy() -> None:
        for target, source in zip(other, tensors, strict=True):
            target.copy_(source)

    done = _reading(tensors, device)
    reading = done.by_name.get(KERNEL, 0.0) if done is not None else 0.0
    if done is None or not reading:
        return None
    speeds = volume / reading, volume / done.seconds, 2 * volume / _copy_seconds(copy, device)
    what = f"{megabytes} MB" if count == 1 else f"{count} × {megabytes} MB"
    return Bandwidth(what, str(dtype).removeprefix("torch."), *speeds, done.launches)


def _reading(tensors: list[torch.Tensor], device: torch.device) -> Work | None:
    """Return what the device does in a step that reads these tensors."""
    import trainsentry

    one = len(tensors) == 1
    part, quantity = ("activations", "activation_output") if one else ("parameters", "parameter")
    model = Passage(device) if one else nn.ParameterList(nn.Parameter(tensor) for tensor in tensors)
    optimizer = Nothing(model.parameters())

    def step() -> None:
        if one:
            model(tensors[0])
        optimizer.step()

    # Of a large input its first samples are read too, as at every step: that is no part of reading one tensor.
    chosen = {"every": 1, "inputs": False} if one else {"every": 1}
    collect: dict[str, Any] = dict.fromkeys(PARTS, False) | {part: chosen}
    with tempfile.TemporaryDirectory() as directory:
        config = {"output_dir": directory, "collect": collect, "on_incident": False, "detect": False}
        with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
            for _ in range(3):
                step()
            done = work_of(step, device, times=10)
            seen = len(monitor.metrics(quantity))
    if seen != len(tensors):
        raise RuntimeError(f"{seen} of {len(tensors)} tensors were read")
    return done


def _copy_seconds(copy: Any, device: torch.device, times: int = 10) -> float:
    """Return the seconds of a copy by the device's clock: the profiler counts copies as moves, events count all."""
    module = torch.get_device_module(device)
    copy()
    begin, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
    begin.record()
    for _ in range(times):
        copy()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / times
