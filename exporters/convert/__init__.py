"""Converts CSV tables, ours or msprobe's, to TensorBoard event files."""
