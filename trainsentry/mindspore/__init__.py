"""The names of `msprobe.mindspore`: in a script written for msprobe, replace the package's name.

The callbacks are loaded when they are first used, because they import MindSpore.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainsentry.monitor.debugger.precision_debugger import PrecisionDebugger
from trainsentry.monitor.msprobe.trainer_mon import TrainerMon
from trainsentry.monitor.seeding import seed_all

if TYPE_CHECKING:
    from trainsentry.monitor.mindspore_callbacks import MsprobeInitStep, MsprobeStep

__all__ = ["MsprobeInitStep", "MsprobeStep", "PrecisionDebugger", "TrainerMon", "seed_all"]


def __getattr__(name: str) -> Any:
    if name in {"MsprobeInitStep", "MsprobeStep"}:
        return getattr(import_module("trainsentry.monitor.mindspore_callbacks"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
