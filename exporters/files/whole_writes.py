"""Appends to files so that they stay readable: what is written is there whole, or not at all."""

import contextlib
import errno
import os
from pathlib import Path
from typing import BinaryIO, Final

LOOK_SECONDS: Final = 1.0
"""Seconds between two looks whether a path still leads to the open file: on a shared file system each asks a server."""


def append_whole(file: BinaryIO, data: bytes) -> None:
    """Append `data` to an unbuffered file; where that fails half-way, the file is cut back to what it was.

    Raises:
        OSError: when the data cannot be written, as on a full disk.

    """
    size = file.seek(0, os.SEEK_END)
    try:
        _write_all(file, data)
    except OSError:
        cut_back(file, size)
        raise


def _write_all(file: BinaryIO, data: bytes) -> None:
    """Write `data` in as many calls as it takes: an unbuffered file may take a part, and say so by a number only."""
    rest = memoryview(data)
    while rest:
        written = file.write(rest)
        if not written:
            raise OSError(errno.EIO, "nothing was written")
        rest = rest[written:]


def cut_back(file: BinaryIO, size: int) -> None:
    """Cut a file back to `size` bytes, where it is one that can be cut."""
    with contextlib.suppress(OSError):
        file.truncate(size)


def is_removed(file: BinaryIO, path: Path, *, thorough: bool) -> bool:
    """Whether somebody has removed an open file; `thorough` asks by its path too, as a shared file system needs it."""
    here = os.fstat(file.fileno())
    if here.st_nlink == 0:
        return True
    if not thorough:
        return False
    try:
        there = path.stat()
    except FileNotFoundError:
        return True
    except OSError:  # not to be told now
        return False
    return (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino)
