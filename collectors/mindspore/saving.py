"""Saves and loads tensors as NumPy files, which msprobe's MindSpore tools read."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from mindspore import Tensor

from trainsentry.collectors.mindspore.rows.tensor_statistics import array_of
from trainsentry.collectors.shared.private_files import new_private_file

SUFFIX = ".npy"


def save_tensor(tensor: Tensor, path: Path) -> None:
    """Write a tensor to a new file; bfloat16 as float32, which holds each of its values exactly."""
    save_array(array_of(tensor), path)


def save_array(array: npt.NDArray[Any], path: Path) -> None:
    """Write an array to a new file that only this user can read."""
    with new_private_file(path) as file:
        np.save(file, array, allow_pickle=False)


def load_tensor(path: Path) -> Tensor:
    """Read a tensor written by `save_tensor`; no code in the file is run."""
    return Tensor(np.load(path, allow_pickle=False))


def stored_bytes(tensor: Tensor) -> int:
    """Return the bytes that `save_tensor` writes, without the file's header."""
    wide = 2 if str(tensor.dtype) == "BFloat16" else 1
    return int(tensor.nbytes) * wide
