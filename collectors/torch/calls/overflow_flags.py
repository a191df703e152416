"""How a device shows an overflow: by Inf and NaN in results, or by a flag beside results cut off at the limit."""

import sys
from typing import Any, Protocol


class OverflowFlags(Protocol):
    """The flag of a device in saturation mode."""

    def clear(self) -> None:
        """Clear it."""

    def is_set(self) -> bool:
        """Whether an operation has overflowed since; waits for the device."""


class NpuFlags:
    """The flag of an Ascend NPU."""

    def __init__(self, tools: Any) -> None:
        self._tools = tools

    def clear(self) -> None:
        """Clear it."""
        self._tools.clear_npu_overflow_flag()

    def is_set(self) -> bool:
        """Whether an operation has overflowed since."""
        return bool(self._tools.get_npu_overflow_flag())


def flags_of_device() -> OverflowFlags | None:
    """Return the flag of an NPU in saturation mode; None where results themselves show an overflow."""
    npu = sys.modules.get("torch_npu")
    tools = getattr(getattr(npu, "npu", None), "utils", None)
    if tools is None or tools.is_support_inf_nan():
        return None
    return NpuFlags(tools)
