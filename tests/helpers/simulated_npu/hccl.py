"""Process groups over the simulated device: `hccl` for its tensors, gloo for those of the host."""

import importlib.util
import sys

import torch.distributed as dist

from . import load
from .build import built


def _collectives():
    name = "collectives"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, built(name, python=True))
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _create(store, rank, size, timeout):
    return _collectives().Hccl(dist.ProcessGroupGloo(store, rank, size, timeout))


def init_process_group(rank, size):
    """Give this process the simulated devices, use one for each rank, and join the ranks."""
    load()
    import torch

    dist.Backend.register_backend("hccl", _create, devices=["npu"])
    torch.npu.set_device(rank % torch.npu.device_count())
    dist.init_process_group("cpu:gloo,npu:hccl", rank=rank, world_size=size)
