"""Creates files for tensors that only this user can read, without following links to other files."""

import os
from pathlib import Path
from typing import BinaryIO, Final

PRIVATE_FOLDER: Final = 0o700
"""The mode of a folder of tensors; the umask may narrow it."""

PRIVATE_FILE: Final = 0o600
"""The mode of a file of tensors, which shows weights, activations and training data to any reader."""


def new_private_file(path: Path) -> BinaryIO:
    """Open a new file that only this user can read; remove an existing file or link of that name first."""
    try:
        return _created(path)
    except FileExistsError:
        path.unlink()
        return _created(path)


def _created(path: Path) -> BinaryIO:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)  # O_EXCL follows no link
    return os.fdopen(os.open(path, flags, PRIVATE_FILE), "wb")


def make_private_folder(path: Path) -> None:
    """Create a folder that only this user can enter, unless it exists; its parents get the umask's mode."""
    path.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
