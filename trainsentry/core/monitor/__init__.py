"""The modules of `msprobe.core.monitor`."""
