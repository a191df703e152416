"""What is asked of MindSpore's own runtime, in one place: its mode, its device, and whether gradients are recorded."""

import mindspore as ms
from mindspore.common.api import _pynative_executor as _executor


def on_host() -> bool:
    """Return whether operations run on the CPU."""
    return str(ms.get_context("device_target")) == "CPU"


def in_graph_mode() -> bool:
    """Return whether cells are compiled as a whole when they are called."""
    return bool(ms.get_context("mode") == ms.GRAPH_MODE)


def is_data_parallel() -> bool:
    """Return whether each rank is to train on data of its own."""
    return str(ms.get_auto_parallel_context("parallel_mode")) == "data_parallel"


def records_gradients() -> bool:
    """Return whether operations are being recorded for a backward pass."""
    return bool(_executor.requires_grad())


def wait() -> None:
    """Wait for the operations that were begun; an error in one of them is raised here."""
    _executor.sync()
