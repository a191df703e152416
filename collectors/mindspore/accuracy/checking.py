"""Checks calls with MindSpore, on one device."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import mindspore as ms

from trainsentry.collectors.calls.rebuilt_values import TensorSource
from trainsentry.collectors.mindspore.accuracy.checked_call import MindSporeCall
from trainsentry.collectors.mindspore.accuracy.precise_runs import PreciseRuns, RunsApart, RunsHere
from trainsentry.collectors.mindspore.runtime import on_host

_KINDS: Final = {"cpu": "CPU", "npu": "Ascend", "ascend": "Ascend", "gpu": "GPU", "cuda": "GPU"}
"""MindSpore's words for kinds of devices."""


class MindSporeChecks:
    """Runs calls on a device: "cpu", "npu:1", or a number of MindSpore's accelerator (the CPU where there is none).

    `folder` holds the dumped tensors; None draws random ones from `seed`. One thread computes, so that the results do
    not depend on how many processes share the work.

    Raises:
        ValueError: for a device that MindSpore does not have.

    """

    def __init__(self, device: str, folder: Path | None, seed: int) -> None:
        self._source = TensorSource(folder, seed)
        ms.set_context(mode=ms.PYNATIVE_MODE)
        _choose(device)
        self._precise: PreciseRuns = RunsHere(self._source) if on_host() else RunsApart(self._source)

    def check(self, call: str, forward: Mapping[str, Any], backward: Mapping[str, Any] | None) -> MindSporeCall:
        """Run a call on both sides; see `collectors.calls.call_check.CallChecks`."""
        return MindSporeCall((call, forward, backward), self._source, self._precise)


def _choose(device: str) -> None:
    """Make MindSpore use a device; the one that it uses already stays."""
    kind, _, number = device.rpartition(":") if not device.isalpha() else (device, "", "0")
    target = _KINDS.get(kind.lower()) if kind else str(ms.get_context("device_target"))
    if target is None or not number.isdigit():
        raise ValueError(f"--devices: {device!r}; allowed with MindSpore: cpu, a number, or npu:<number>")
    if target == "CPU" and on_host():
        return
    try:
        ms.set_device(target, int(number))
        ms.Tensor([0.0]).asnumpy()
    except (RuntimeError, ValueError, TypeError) as error:
        text = (str(error).splitlines() or [""])[0]
        raise ValueError(f"--devices: {device!r}: {text}") from None
