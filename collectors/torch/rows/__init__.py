"""Turns torch tensors into rows of statistics, on the host and on accelerators."""
