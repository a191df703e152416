"""Calls of modules and operations, forward and backward, as a debugger sees them."""
