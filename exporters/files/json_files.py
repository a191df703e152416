"""Writes text and JSON files that are replaced as a whole, JSON-lines files that are appended to, and `run.json`."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any, Final

from trainsentry.exporters.files.foreign_files import InputError, read_object
from trainsentry.exporters.files.whole_writes import append_whole


def replace_json(path: Path, data: Any) -> None:
    """Write `data` atomically: a reader sees the old file or the complete new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(data, indent=1) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Write a text atomically: a reader sees the old file or the complete new one.

    Raises:
        OSError: when it cannot be written; nothing of it stays.

    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # what somebody put there may be a link
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def append_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    """Append JSON lines in one write, all or none; first cut off a torn last line that a killed writer left."""
    if not lines:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    cut_torn_line(path)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    with path.open("ab", buffering=0) as file:
        append_whole(file, text.encode())


def cut_torn_line(path: Path) -> None:
    """Cut off the incomplete last line of a file, if the file exists."""
    try:
        with path.open("rb+") as file:
            size = file.seek(0, os.SEEK_END)
            if size == 0:
                return
            file.seek(size - 1)
            if file.read(1) == b"\n":
                return
            tail = min(size, 1 << 20)
            file.seek(size - tail)
            cut = file.read(tail).rfind(b"\n")
            file.truncate(size - tail + cut + 1)
    except FileNotFoundError:
        return


SCHEMA_VERSION: Final = 1
"""Version of all files in the output directory; it changes when readers must change."""


def write_run(path: Path, start: dict[str, Any]) -> None:
    """Write the description of a run once; a later start in the same directory is added to `starts`."""
    moment = {key: start[key] for key in ("start_time", "start_step", "restart")}
    try:
        known = read_object(path)
        known["starts"].append(moment)
    except (OSError, InputError, KeyError, AttributeError):
        known = {"schema_version": SCHEMA_VERSION, **start, "starts": [moment]}
    replace_json(path, known)
