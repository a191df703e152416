"""The modules of `msprobe.pytorch.monitor`."""
