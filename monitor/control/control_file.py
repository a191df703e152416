"""The file through which a running job gets commands: a JSON line each, by its owner alone."""

import json
import os
import stat
from pathlib import Path
from typing import Any, Final

from trainsentry.exporters.files.foreign_files import InputError, parse_json

NAME: Final = "control.jsonl"

MOST_BYTES: Final = 1 << 16
"""Bytes read at once; a command has about a hundred."""


def send(path: Path, command: dict[str, Any]) -> None:
    """Append a command to the file, which is made for its owner alone.

    Raises:
        PermissionError: when the file belongs to somebody else, or others may write to it.
        OSError: when it cannot be written.

    """
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        check_owner(path, os.fstat(handle))
        os.write(handle, (json.dumps(command) + "\n").encode())
    finally:
        os.close(handle)


def check_owner(path: Path, found: os.stat_result) -> None:
    """Check that only this process's user can have written a file.

    Raises:
        PermissionError: otherwise.

    """
    if not stat.S_ISREG(found.st_mode):
        raise PermissionError(f"{path}: is not a regular file")
    if hasattr(os, "geteuid") and found.st_uid != os.geteuid():
        raise PermissionError(f"{path}: belongs to user {found.st_uid}; only the user of the run may control it")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{path}: others may write to it; allowed: chmod 600")


def parse_command(line: bytes) -> dict[str, Any]:
    """Return the command in a line.

    Raises:
        InputError: when it is not one.

    """
    found = parse_json(line)
    kinds = [kind for kind in ("set", "dump", "stop") if isinstance(found, dict) and kind in found]
    if len(kinds) != 1 or (kinds == ["set"] and not isinstance(found["set"], dict)):
        raise InputError(f"{NAME}: {line[:100].decode(errors='replace')}: allowed: one of set, dump, stop")
    steps = found.get("for", 1)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise InputError(f"{NAME}: for: got {steps!r}, allowed: a whole number from 1 on")
    return dict(found)


class ControlFile:
    """Reads the commands that are appended from now on; what stands there already was for an earlier run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode, self._read = self._state()
        self._rest = b""

    def new_lines(self) -> list[bytes]:
        """Return the lines since the last call; `parse_command` reads one.

        Raises:
            PermissionError: when somebody else may have written them; they are left out.
            OSError: when the file cannot be read.

        """
        inode, size = self._state()
        if inode != self._inode or size < self._read:
            self._inode, self._read, self._rest = inode, 0, b""
        if size == self._read:
            return []
        begin, self._read = self._read, size  # now, so that a file that is refused is refused once
        handle = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            check_owner(self.path, os.fstat(handle))
            data = os.pread(handle, min(size - begin, MOST_BYTES), begin)
        finally:
            os.close(handle)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line for line in lines if line.strip()]

    def _state(self) -> tuple[int, int]:
        try:
            found = self.path.lstat()
        except OSError:  # no such file yet, or no such folder
            return 0, 0
        return found.st_ino, found.st_size
