"""The modules of `msprobe.core`."""
