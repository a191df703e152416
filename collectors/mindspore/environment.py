"""What is known of this process: its rank, and the framework's version."""

import os
from typing import Any

import mindspore as ms


def rank_and_world_size() -> tuple[int, int]:
    """Return rank and number of ranks: of the communication, else of the launcher's variables, else 0 of 1."""
    try:
        rank, size = int(ms.communication.get_rank()), int(ms.communication.get_group_size())
    except (RuntimeError, ValueError, TypeError):  # it has not been initialized
        rank, size = 0, 1
    if size > 1:
        return rank, size
    named = os.environ.get("RANK_ID") or os.environ.get("MS_NODE_ID") or "0"
    count = os.environ.get("RANK_SIZE") or os.environ.get("MS_WORKER_NUM") or "1"
    return int(named), int(count)


def describe_environment() -> dict[str, Any]:
    """Return the framework and the device, for `run.json`."""
    return {
        "framework": "mindspore",
        "framework_version": ms.__version__,
        "accelerator": str(ms.get_context("device_target")).lower(),
    }
