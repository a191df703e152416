"""Saving and loading of tensors; loading never runs code from the file."""

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
"""What torch's older file format holds. It takes half the time of the newer one, whose checksum costs 0.4 ms a MB."""


def save_tensor(tensor: Tensor, path: Path) -> None:
    """Write what `tensor` holds on this rank; a view is saved without the storage behind it."""
    held = local(tensor).cpu()
    if held.layout is not torch.strided or held.untyped_storage().nbytes() != held.numel() * held.element_size():
        held = held.clone()
    with new_private_file(path) as file:
        torch.save(held, file, _use_new_zipfile_serialization=held.dtype not in PLAIN)


def save_again(known: Path, path: Path, tensor: Tensor) -> None:
    """Give a tensor's file that is there already a second name; where that cannot be, write another."""
    try:
        path.hardlink_to(known)
    except OSError:  # there is one already, or the file system knows no links
        save_tensor(tensor, path)


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
    """Return the bytes that `save_tensor` writes, without the file's own frame."""
    held = local(tensor)
    return held.numel() * held.element_size()
