"""The name of `msprobe.mindspore.monitor.module_hook`."""

from trainsentry.monitor.msprobe.trainer_mon import TrainerMon

__all__ = ["TrainerMon"]
