"""Compiled code that works on addresses and knows no framework. `host_rows` is missing where there was no compiler."""

import importlib.util
from typing import Final

HOW_TO_COMPILE: Final = "install a C compiler, then pip install --force-reinstall trainsentry"
"""What brings the kernel where it is missing."""


def is_compiled() -> bool:
    """Whether the kernel for tensors in host memory is here."""
    return importlib.util.find_spec("trainsentry.collectors.native.host_rows") is not None
