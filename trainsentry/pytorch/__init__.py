"""The names of `msprobe.pytorch`: in a script written for msprobe, replace the package's name."""

from trainsentry.monitor.debugger.precision_debugger import PrecisionDebugger
from trainsentry.monitor.msprobe.trainer_mon import TrainerMon
from trainsentry.monitor.seeding import seed_all

__all__ = ["PrecisionDebugger", "TrainerMon", "seed_all"]
