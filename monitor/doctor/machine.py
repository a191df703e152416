"""Checks of the machine that need no framework: Python, the compiled kernel, memory that processes share, the disk."""

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import trainsentry
from trainsentry.collectors.native import HOW_TO_COMPILE, is_compiled
from trainsentry.monitor.config.schema import MonitorConfig
from trainsentry.monitor.doctor.check import Check
from trainsentry.monitor.recorder.ring import Ring

FRAMEWORKS: Final = ("torch", "torch_npu", "mindspore")
PACKAGES: Final = (*FRAMEWORKS, "triton", "triton-ascend", "deepspeed", "numpy", "pandas", "pydantic", "tensorboard")
"""Packages whose versions decide what works."""

VARIABLES: Final = (
    "ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "FORCE_OVERFLOW_CHECK", "INF_NAN_MODE_ENABLE",
    "INF_NAN_MODE_FORCE_DISABLE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MS_ASCEND_CHECK_OVERFLOW_MODE", "NPU_ASD_ENABLE",
    "OMP_NUM_THREADS", "RANK", "TORCH_DEVICE_BACKEND_AUTOLOAD", "TRITON_INTERPRET", "WORLD_SIZE",
)  # fmt: skip
"""Variables that the file may hold: numbers, switches and lists of devices. No other variable is written."""

LEAST_DISK: Final = 2**30
"""Free bytes of the current folder, below which tables of a long run will not fit."""


def machine_checks() -> Iterator[Check]:
    """Yield the checks."""
    yield Check("trainsentry", "OK", f"{trainsentry.__version__}, Python {platform.python_version()}")
    yield _frameworks()
    yield _native_kernel()
    yield _ring()
    yield _disk()


def packages() -> dict[str, str]:
    """Return the versions of the packages that are installed, by name; imports none."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def facts() -> dict[str, object]:
    """Return what the file says of the machine: no name of a host, a user or a folder."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processors": os.cpu_count(),
        "packages": packages(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def _frameworks() -> Check:
    found = [f"{name} {version}" for name, version in packages().items() if name in FRAMEWORKS]
    if found:
        return Check("frameworks", "OK", ", ".join(found))
    return Check("frameworks", "missing", "neither torch nor mindspore", "pip install the build for your device")


def _native_kernel() -> Check:
    if is_compiled():
        return Check("kernel for host memory", "OK", "compiled")
    return Check("kernel for host memory", "slow", "not compiled: NumPy does its work", HOW_TO_COMPILE)


def _ring() -> Check:
    """Make a ring of the usual size: where a container has no memory for it, it fails as `watch` would."""
    size = MonitorConfig().ring_size
    ring = Ring.create(size)
    ring.close()
    way = "without a name in any file system" if hasattr(os, "memfd_create") else f"in {sys.platform}'s temporary files"
    return Check("memory shared with the recorder", "OK", f"{size >> 20} MB, {way}")


def _disk() -> Check:
    free = shutil.disk_usage(Path.cwd()).free
    if not os.access(Path.cwd(), os.W_OK):
        return Check("disk", "missing", "the current folder is read-only", "set output_dir to a folder that is not")
    found = f"{free / 2**30:.0f} GB free in the current folder"
    if free < LEAST_DISK:
        return Check("disk", "missing", found, "set output_dir elsewhere, or disk_quota to less")
    return Check("disk", "OK", found)
