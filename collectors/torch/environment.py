"""Reports this process's rank, torch's version and the accelerator."""

import os
from typing import Any

import torch
import torch.distributed as dist

from trainsentry.collectors.torch.device.cpu import CPU
from trainsentry.collectors.torch.device.registry import accelerator


def rank_and_world_size() -> tuple[int, int]:
    """Return rank and number of ranks, from the process group, else RANK and WORLD_SIZE, else (0, 1)."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def several_ranks() -> bool:
    """Whether a process group exists; one rank is enough, because wrappers work with it too."""
    return dist.is_available() and dist.is_initialized()


def describe_environment() -> dict[str, Any]:
    """Return the framework, its version and the accelerator, for `run.json`."""
    device = accelerator() or CPU
    return {
        "framework": "pytorch",
        "framework_version": torch.__version__,
        "accelerator": device.type,
        **({"accelerator_versions": versions} if (versions := device.versions()) else {}),
    }
