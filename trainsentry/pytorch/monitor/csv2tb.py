"""The name of `msprobe.pytorch.monitor.csv2tb`."""

from trainsentry.exporters.convert.msprobe_csv2tb import csv2tensorboard_by_step

__all__ = ["csv2tensorboard_by_step"]
