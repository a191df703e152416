"""Graphs of calls, as msprobe's TensorBoard plugin shows them."""
