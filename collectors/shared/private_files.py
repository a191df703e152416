"""Files that hold tensors: for this user alone, and never another name of a file that is to stay as it is."""

import os
from pathlib import Path
from typing import BinaryIO, Final

PRIVATE_FOLDER: Final = 0o700
"""The mode of a folder of tensors; a narrower umask holds all the same."""

PRIVATE_FILE: Final = 0o600
"""The mode of a file that holds a tensor: weights, activations and what went into the model can be read from it."""


def new_private_file(path: Path) -> BinaryIO:
    """Open a new file, for this user alone; a file that has the name, or a link, is taken away first."""
    try:
        return _created(path)
    except FileExistsError:
        path.unlink()
        return _created(path)


def _created(path: Path) -> BinaryIO:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)  # O_EXCL follows no link
    return os.fdopen(os.open(path, flags, PRIVATE_FILE), "wb")


def make_private_folder(path: Path) -> None:
    """Make a folder for this user alone, where there is none; those above it are as the umask has them."""
    path.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
