"""The name of `msprobe.pytorch.monitor.module_hook`."""

from trainsentry.monitor.msprobe.trainer_mon import TrainerMon

__all__ = ["TrainerMon"]
