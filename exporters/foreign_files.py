"""Reads files that somebody else wrote: plain files only, within bounds, with one kind of error that names the file.

Whatever a file holds, a reader ends with its content or with `NotOurs`; nothing in it is run.
"""

import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from trainsentry.exporters.json_files import Report

LONGEST_LINE: Final = 1 << 20
"""Bytes of the longest line of JSON that is read: an incident with all its suspects has some ten thousand."""

MOST_OF_LINES: Final = 1 << 28
"""Bytes of a file of JSON lines that are read: half a million anomalies, which are half a gigabyte of objects."""

MOST_OF_OBJECT: Final = 1 << 29
"""Bytes of the largest JSON object that is read: the dump of a step with half a million calls."""

MOST_OF_SETTINGS: Final = 1 << 24
"""Bytes of the largest configuration, status or state that is read: a status has some thousand."""

DEEPEST: Final = 64
"""Nested lists and objects of JSON: what is written here has up to ten, a tensor in a list in a mapping of a call."""

_HALF_OF_A_PAIR: Final = re.compile(r"\\u[dD][89a-fA-F]")
_ESCAPE: Final = re.compile(r"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(u[dD][89a-fA-F]..)|.)", re.DOTALL)


class NotOurs(ValueError):
    """A directory or file that trainsentry did not write, or that is larger than it would write."""


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading, if it is a plain one: a pipe would wait, and a device would never end.

    Raises:
        NotOurs: when it is no plain file.
        OSError: when it cannot be opened.

    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise NotOurs(f"{path}: is no plain file")
    return os.fdopen(handle, "rb")


def read_bytes(path: Path, most: int) -> bytes:
    """Return the content of a plain file of at most `most` bytes.

    Raises:
        NotOurs: when it is no plain file, or larger.
        OSError: when it cannot be read.

    """
    with open_file(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise NotOurs(f"{path}: has more than {most} bytes")
    return data


def parse_json(text: str | bytes) -> Any:
    """Return what a JSON text says; half of a surrogate pair, which nothing can write, is read as its escape.

    Raises:
        NotOurs: when it is no JSON, or nested deeper than DEEPEST.

    """
    try:
        whole = text if isinstance(text, str) else text.decode("utf-8", "replace")
        if _HALF_OF_A_PAIR.search(whole):
            whole = _ESCAPE.sub(lambda m: f"\\\\{m[1]}" if m[1] else m[0], whole)
        value = json.loads(whole)
    except RecursionError:
        raise NotOurs(f"nested deeper than {DEEPEST}") from None
    except MemoryError:
        raise NotOurs("more than the memory holds") from None
    except ValueError as error:
        raise NotOurs(f"no JSON: {error}") from None
    if is_deep(value):
        raise NotOurs(f"nested deeper than {DEEPEST}")
    return value


def is_deep(value: Any) -> bool:
    """Return whether lists and objects are nested deeper than DEEPEST.

    >>> is_deep([[{"a": 1}]])
    False
    """
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [item for x in level for item in _items(x) if isinstance(item, (dict, list))]
        if not level:
            return False
    return True


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def read_object(path: Path, most: int = MOST_OF_SETTINGS) -> dict[str, Any]:
    """Return the object in a JSON file of at most `most` bytes.

    Raises:
        NotOurs: when it holds none.
        OSError: when it cannot be read.

    """
    data = read_bytes(path, most)
    try:
        value = parse_json(data)
    except NotOurs as error:
        raise NotOurs(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise NotOurs(f"{path}: holds a {type(value).__name__}, expected an object")
    return value


def lines_of(file: BinaryIO, longest: int = LONGEST_LINE) -> Iterator[tuple[int, bytes | None]]:
    """Yield number and bytes of each line of a file; None for one longer than `longest`, which is passed over."""
    number = 0
    while line := file.readline(longest + 1):
        number += 1
        if len(line) <= longest or line.endswith(b"\n"):
            yield number, line
            continue
        pass_line(file)
        yield number, None


def pass_line(file: BinaryIO, at_a_time: int = 1 << 20) -> int:
    """Pass over the rest of a line, however long; return its bytes."""
    passed = 0
    while part := file.readline(at_a_time):
        passed += len(part)
        if part.endswith(b"\n"):
            break
    return passed


def read_lines(path: Path, report: Report) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line number and object of each line of a JSON-lines file; a malformed line is reported and left out.

    Raises:
        NotOurs: when it is no plain file.
        OSError: when it cannot be opened.

    """
    with open_file(path) as file:
        for number, line in lines_of(file):
            if line is None:
                report(path, number, f"the line has more than {LONGEST_LINE} bytes")
                continue
            try:
                value = parse_json(line)
            except NotOurs as error:
                report(path, number, str(error))
                continue
            if isinstance(value, dict):
                yield number, value
            else:
                report(path, number, f"a {type(value).__name__}, expected an object")
            if file.tell() > MOST_OF_LINES:
                report(path, number + 1, f"what stands behind {MOST_OF_LINES} bytes is not read")
                return
