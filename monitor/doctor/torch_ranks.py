"""Checks among ranks, where a launcher started several: the device's collectives, and a watched training over them."""

import contextlib
import io
import os
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

# Before any group is made: the defaults of its functions would keep the group and its threads for good.
import torch.distributed.nn
from torch import nn

from trainsentry.collectors.torch.device.cpu import CPU
from trainsentry.collectors.torch.device.device import Device
from trainsentry.monitor.doctor.check import REPORT, Check
from trainsentry.monitor.train_monitor import TrainMonitor

STEPS: Final = 6
ELEMENTS: Final = 2**22
"""Elements of the all-reduce that is timed: 16 MB."""


PATIENCE: Final = timedelta(minutes=5)
"""How long a rank waits for another one, to join or in a collective: torch's half an hour is for trainings."""


def launched_ranks() -> int:
    """Return the number of ranks that the launcher started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextlib.contextmanager
def joined(device: Device) -> Iterator[None]:
    """Join the ranks over the device's usual backend, with one device a rank; leave them at the end.

    A process group that is still there as its process ends has threads that may abort it. One that somebody else
    made is used, and left to them.
    """
    if not device.on_host:
        number = int(os.environ.get("LOCAL_RANK", "0")) % max(len(device.devices()), 1)
        device.module.set_device(number)
    if dist.is_initialized():
        yield
        return
    names = dict.fromkeys((f"cpu:{CPU.collectives}", f"{device.type}:{device.collectives}"))
    dist.init_process_group(",".join(names), timeout=PATIENCE)
    try:
        yield
    finally:
        dist.destroy_process_group()


def rank_checks(device: Device) -> Iterator[Check]:
    """Yield the checks; every rank takes part, and each has the same results."""
    yield _reduced(device)
    with tempfile.TemporaryDirectory(prefix="trainsentry-doctor-") as folder:
        shared = [folder]
        dist.broadcast_object_list(shared, 0)
        losses = _train(device), _train(device, str(shared[0]))
        dist.barrier()
    yield _harm(losses)


def _reduced(device: Device) -> Check:
    size = dist.get_world_size()
    x = torch.ones(ELEMENTS, device=device.type)
    dist.all_reduce(x)  # the first one connects the ranks
    device.synchronize(torch.device(device.type))
    began = time.perf_counter()
    dist.all_reduce(x)
    device.synchronize(torch.device(device.type))
    seconds = time.perf_counter() - began
    name = f"{size} ranks over {device.collectives}"
    if float(x[0]) != float(size * size) or float(x[-1]) != float(size * size):
        return Check(name, "wrong", f"an all-reduce of ones gives {float(x[0]):g}", "check the network of the ranks")
    return Check(name, "OK", f"16 MB are all-reduced in {1e3 * seconds:.1f} ms")


def _train(device: Device, folder: str | None = None) -> list[float]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)).to(device.type)
    model = nn.parallel.DistributedDataParallel(plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = None
    if folder is not None:
        settings = {"output_dir": folder, "strict": True, "export": {"report": False}}
        monitor = TrainMonitor(settings).watch(model, optimizer)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(STEPS):
        loss = model(torch.randn(16, 32, generator=generator).to(device.type)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    if monitor is not None:
        with contextlib.redirect_stderr(io.StringIO()):  # its closing line
            monitor.close()
    return [float(x) for x in losses]


def _harm(losses: tuple[list[float], list[float]]) -> Check:
    everyone: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(everyone, losses[0] == losses[1])
    if all(everyone):
        return Check("no harm among ranks", "OK", f"losses of {STEPS} steps of DDP are equal to the bit on every rank")
    ranks = ", ".join(str(rank) for rank, same in enumerate(everyone) if not same)
    return Check("no harm among ranks", "wrong", f"a watched training has other losses on rank {ranks}", REPORT)
