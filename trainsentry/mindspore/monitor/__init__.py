"""The modules of `msprobe.mindspore.monitor`."""
