"""Compiled code. It knows no framework and no tensors, only addresses; `host_rows` is missing where no compiler was."""
