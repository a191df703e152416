"""Appends to files atomically: a write is complete or leaves nothing."""

import contextlib
import errno
import os
from pathlib import Path
from typing import BinaryIO, Final

LOOK_SECONDS: Final = 1.0
"""Seconds between checks that a path still leads to the open file; on a shared file system each check asks a server."""


def append_whole(file: BinaryIO, data: bytes) -> None:
    """Append `data` to an unbuffered file; on failure, cut the file back to its old size.

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
    """Write all of `data`; an unbuffered file may write only part of it per call."""
    rest = memoryview(data)
    while rest:
        written = file.write(rest)
        if not written:
            raise OSError(errno.EIO, "nothing was written")
        rest = rest[written:]


def cut_back(file: BinaryIO, size: int) -> None:
    """Cut a file back to `size` bytes, if it can be truncated."""
    with contextlib.suppress(OSError):
        file.truncate(size)


def is_removed(file: BinaryIO, path: Path, *, thorough: bool) -> bool:
    """Whether somebody has removed an open file; `thorough` also checks the path, which shared file systems need."""
    opened = os.fstat(file.fileno())
    if opened.st_nlink == 0:
        return True
    if not thorough:
        return False
    try:
        found = path.stat()
    except FileNotFoundError:
        return True
    except OSError:  # unknown for now
        return False
    return (found.st_dev, found.st_ino) != (opened.st_dev, opened.st_ino)
