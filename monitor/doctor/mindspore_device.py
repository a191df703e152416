"""Checks of MindSpore's device: which it is, its memory, its mode, and how an overflow shows on it."""

from collections.abc import Iterator
from typing import Final

import mindspore as ms

from trainsentry.collectors.mindspore.runtime import in_graph_mode, on_host, saturates
from trainsentry.monitor.doctor.check import Check, without_secrets

AUTO: Final = "auto"
TARGETS: Final = {AUTO: "", "cpu": "CPU", "npu": "Ascend", "cuda": "GPU"}
"""What MindSpore calls each device; nothing for the one that it has chosen itself."""

NEEDS: Final = {
    "Ascend": "install the MindSpore build for Ascend, and source CANN's set_env.sh",
    "GPU": "install a MindSpore build for GPUs",
}


def choose(name: str) -> Check | None:
    """Make a device of `TARGETS` MindSpore's own, and compute on it; return a check that says why that cannot be.

    MindSpore refuses to be told its device once it has computed, even where that device is the one it uses.
    """
    target = TARGETS[name] or _target()
    try:
        if target != _target():
            ms.set_device(target)
        (ms.Tensor([1.0]) + 1.0).asnumpy()
    except (RuntimeError, ValueError) as error:
        found = without_secrets(str(error).strip().partition("\n")[0].partition(". ")[0])
        return Check("device", "missing", found, NEEDS.get(target, "see the error"))
    return None


def device_checks() -> Iterator[Check]:
    """Yield the checks."""
    target = _target()
    yield Check(f"device {target}", "OK", f"{ms.hal.get_device_name(0)}, {ms.hal.device_count(target)} there")
    mode = "graph mode: cells are compiled" if in_graph_mode() else "PyNative mode"
    yield Check("mode", "OK", mode)
    where = "statistics are summed in float64" if on_host() else "statistics are summed on the device, in float32"
    yield Check("float64", "OK", where)
    if saturates():
        yield Check("overflow", "OK", "saturates: the largest values show it")
    else:
        yield Check("overflow", "OK", "shows as Inf or NaN in the values")


def _target() -> str:
    return str(ms.get_context("device_target"))
