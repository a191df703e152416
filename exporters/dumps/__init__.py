"""Dumps of tensors in msprobe's layout, written and read."""
