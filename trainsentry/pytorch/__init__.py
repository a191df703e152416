"""The names of `msprobe.pytorch`: in a script written for msprobe, replace the package's name."""

from trainsentry.monitor.debugger.precision_debugger import PrecisionDebugger
from trainsentry.monitor.msprobe.trainer_mon import TrainerMon
from trainsentry.monitor.seeding import seed_all

module_dump = PrecisionDebugger.module_dump
module_dump_end = PrecisionDebugger.module_dump_end

__all__ = ["PrecisionDebugger", "TrainerMon", "module_dump", "module_dump_end", "seed_all"]
