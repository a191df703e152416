"""Reads NumPy files that others wrote: numeric arrays only, no larger than the file."""

import math
import os
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from trainsentry.exporters.files.foreign_files import InputError, open_file

_NUMBERS: Final = "biufc"
"""Allowed dtype kinds: bool, integer, floating point, complex."""


def read_array(path: Path) -> npt.NDArray[Any]:
    """Return the array in a `.npy` file; the shape in its header must fit the file's size.

    Raises:
        InputError: when it holds no numeric array.
        OSError: when it cannot be read.

    """
    with open_file(path) as file:
        try:
            return _array(file)
        except OSError:
            raise
        except Exception as error:  # NumPy parses a header as a Python literal, with any of its errors
            raise InputError(f"{path}: cannot be loaded as a tensor: {str(error) or type(error).__name__}") from error


def _array(file: BinaryIO) -> npt.NDArray[Any]:
    shape, dtype = _header(file)
    if dtype.hasobject or dtype.kind not in _NUMBERS:
        raise InputError(f"holds {dtype}, expected numbers")
    needed, stored = math.prod(shape) * dtype.itemsize, os.fstat(file.fileno()).st_size - file.tell()
    if needed > stored or any(n < 0 for n in shape):
        raise InputError(f"claims {needed} bytes but has {stored}")
    file.seek(0)
    found: npt.NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
    return found


def _header(file: BinaryIO) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape and dtype of the array in a file.

    Raises:
        ValueError: when it does not begin with such a header.

    """
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    elif version == (2, 0):
        shape, _, dtype = np.lib.format.read_array_header_2_0(file)
    else:
        raise InputError(f"version {version} of the format; allowed: 1.0 and 2.0")
    return shape, dtype
