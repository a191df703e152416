"""The OpenMP runtime whose threads torch computes with on a CPU."""

import ctypes
import sys

import torch


def parallel_region() -> int:
    """Return the address of `GOMP_parallel` in the runtime that torch has loaded, 0 where it cannot be told.

    GNU's runtime has it, and Intel's and LLVM's have it for code that GNU compilers made. The workers that it wakes
    are torch's own for the calling thread: no other pool comes into being.
    """
    if sys.platform != "linux" or "parallel backend: OpenMP" not in torch.__config__.parallel_info():
        return 0
    try:
        entry = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError):
        return 0
    return ctypes.cast(entry, ctypes.c_void_p).value or 0
