"""Saves and loads tensors; loading never runs code from the file."""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainsentry.collectors.shared.private_files import new_private_file
from trainsentry.collectors.torch.rows.local_tensor import local

SUFFIX = ".pt"

PLAIN = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.complex128,
        torch.complex64,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)
"""Dtypes of torch's older file format, which takes half the time of the newer one, whose checksum costs 0.4 ms a MB."""


def save_tensor(tensor: Tensor, path: Path) -> None:
    """Write a tensor's part on this rank; a view is saved without the rest of its storage."""
    part = local(tensor).cpu()
    if part.layout is not torch.strided or part.untyped_storage().nbytes() != part.numel() * part.element_size():
        part = part.clone()
    with new_private_file(path) as file:
        torch.save(part, file, _use_new_zipfile_serialization=part.dtype not in PLAIN)


def save_again(known: Path, path: Path) -> None:
    """Hard-link a tensor's existing file to another path; copy it where that fails."""
    try:
        path.hardlink_to(known)
    except OSError:  # the path exists, or the file system has no hard links
        with new_private_file(path) as file, known.open("rb") as written:
            shutil.copyfileobj(written, file)


def load_tensor(path: Path) -> Tensor:
    """Read a tensor written by `save_tensor`.

    Raises:
        TypeError: when the file holds anything but a tensor.
        pickle.UnpicklingError: when the file asks for code to be run.

    """
    value: Any = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(value, Tensor):
        raise TypeError(f"{path}: holds a {type(value).__name__}, expected a tensor")
    return value


def stored_bytes(tensor: Tensor) -> int:
    """Return the bytes that `save_tensor` writes, without the file's header."""
    part = local(tensor)
    return part.numel() * part.element_size()
