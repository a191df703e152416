"""Queries MindSpore's runtime: rank, version, mode, device, and whether gradients are recorded; waits for it."""

import os
from typing import Any, Final

import mindspore as ms
from mindspore._c_expression import MSContext
from mindspore.common.api import _pynative_executor as _executor

ASCEND: Final = "Ascend"
OVERFLOW_MODE: Final = "MS_ASCEND_CHECK_OVERFLOW_MODE"
SATURATION: Final = "SATURATION_MODE"
FIRST_CHIPS: Final = "amp_loss_scale_train_classic_target"
"""What MindSpore calls the chips that have no Inf and NaN mode."""


def rank_and_world_size() -> tuple[int, int]:
    """Return rank and number of ranks, from the communication, else the launcher's variables, else 0 of 1."""
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


def on_host() -> bool:
    """Return whether operations run on the CPU."""
    return str(ms.get_context("device_target")) == "CPU"


def saturates() -> bool:
    """Return whether results that overflow stay finite: on Ascend's first chips, and where MindSpore is asked for it.

    These are the conditions under which MindSpore's own loss scaler reads the device's flag (`mindspore.amp`).
    """
    if str(ms.get_context("device_target")) != ASCEND:
        return False
    if os.environ.get(OVERFLOW_MODE) == SATURATION:
        return True
    supports = getattr(MSContext.get_instance(), "ascend_soc_supports_feature", None)
    return supports is not None and bool(supports(FIRST_CHIPS))


def in_graph_mode() -> bool:
    """Return whether cells are compiled as a whole when they are called."""
    return bool(ms.get_context("mode") == ms.GRAPH_MODE)


def is_data_parallel() -> bool:
    """Return whether MindSpore is set up for data parallelism, where each rank has its own data."""
    return str(ms.get_auto_parallel_context("parallel_mode")) == "data_parallel"


def records_gradients() -> bool:
    """Return whether MindSpore is recording operations for a backward pass."""
    return bool(_executor.requires_grad())


def wait() -> None:
    """Wait for all operations under way; raises the error of one that has failed."""
    _executor.sync()
