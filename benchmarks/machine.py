"""Describes the machine that runs a benchmark."""

import os
import platform
from importlib.util import find_spec
from pathlib import Path

import numpy as np


def describe_machine() -> str:
    """Return processor, cores, memory and versions in one line."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{cpu}, {os.cpu_count()} cores, {memory:.0f} GiB, Python {platform.python_version()}, "
        f"{_framework()}, numpy {np.__version__}"
    )


def _framework() -> str:
    if find_spec("torch") is not None:
        import torch

        return f"torch {torch.__version__} ({torch.get_num_threads()} threads)"
    import mindspore

    return f"mindspore {mindspore.__version__}"
