"""Reads files that others wrote: regular files only, within size limits, with one exception that names the file.

Whatever a file holds, a reader returns its content or raises `InputError`; it never runs anything in it.
"""

import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

Report = Callable[[Path, int, str], None]
"""Receives a problem: file, line number (from 1; 0 for the whole file) and message."""


MAX_LINE_BYTES: Final = 1 << 20
"""Bytes of a JSON line at most: an incident with all its suspects has about 10,000."""

MAX_LINES_BYTES: Final = 1 << 28
"""Bytes read of a JSON-lines file: half a million anomalies, which take half a gigabyte as objects."""

MAX_OBJECT_BYTES: Final = 1 << 29
"""Bytes of a JSON object at most: the dump of a step with half a million calls."""

MAX_SETTINGS_BYTES: Final = 1 << 24
"""Bytes of a configuration, status or state at most: a status has about 1,000."""

MAX_DEPTH: Final = 64
"""Nesting depth of JSON at most: our own files reach 10 (a tensor in a list in a mapping of a call)."""

_BETWEEN: Final = re.compile(r"[ \t\r\n,]*")
_LONE_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")
_ESCAPE: Final = re.compile(r"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(u[dD][89a-fA-F]..)|.)", re.DOTALL)


class InputError(ValueError):
    """A directory or file that cannot be read: missing, damaged, too large, or of another format."""


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading; a pipe would block, and a device would never end.

    Raises:
        InputError: when it is not a regular file.
        OSError: when it cannot be opened.

    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise InputError(f"{path}: is not a regular file")
    return os.fdopen(handle, "rb")


def read_bytes(path: Path, limit: int) -> bytes:
    """Return the content of a regular file of at most `limit` bytes.

    Raises:
        InputError: when it is not a regular file, or larger.
        OSError: when it cannot be read.

    """
    with open_file(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise InputError(f"{path}: has more than {limit} bytes")
    return data


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text; a lone surrogate, which UTF-8 cannot hold, is kept as its escape.

    Raises:
        InputError: when it is not JSON, or nested deeper than MAX_DEPTH.

    """
    try:
        value = json.loads(_writable(text if isinstance(text, str) else text.decode("utf-8", "replace")))
    except RecursionError:
        raise InputError(f"nested deeper than {MAX_DEPTH}") from None
    except MemoryError:
        raise InputError("does not fit in memory") from None
    except ValueError as error:
        raise InputError(f"not JSON: {error}") from None
    if is_deep(value):
        raise InputError(f"nested deeper than {MAX_DEPTH}")
    return value


def _writable(text: str) -> str:
    """Escape the lone surrogates of a JSON text; UTF-8 cannot hold them."""
    if not _LONE_SURROGATE.search(text):
        return text
    return _ESCAPE.sub(lambda m: f"\\\\{m[1]}" if m[1] else m[0], text)


def is_deep(value: Any, max_items: int | None = None) -> bool:
    """Return whether lists and objects are nested deeper than MAX_DEPTH, or have over `max_items` items in total.

    >>> is_deep([[{"a": 1}]])
    False
    """
    level, count = [value], 0
    for _ in range(MAX_DEPTH + 1):
        level = [item for x in level for item in _items(x) if isinstance(item, (dict, list))]
        count += sum(map(len, level)) if max_items is not None else 0
        if not level:
            return False
        if max_items is not None and count > max_items:
            return True
    return True


def complete_members(text: str, deep: int) -> dict[str, Any]:
    """Return the complete members of an object whose text is truncated, down to `deep` nested objects.

    The text is read once per object that the cut falls into, so the time is linear in its length.

    >>> complete_members('{"a": 1, "b": {"c": [2], "d": [3', 2)
    {'a': 1, 'b': {'c': [2]}}

    Raises:
        InputError: when it does not begin with an object, or is nested deeper than MAX_DEPTH.

    """
    try:
        found = _members(_writable(text), 0, deep)
    except (RecursionError, MemoryError):
        found = None
    if found is None or is_deep(found):
        raise InputError("not JSON")
    return found


def _members(text: str, at: int, deep: int) -> dict[str, Any] | None:
    decode = json.JSONDecoder().raw_decode
    at = _next(text, at)
    if text[at : at + 1] != "{":
        return None
    found: dict[str, Any] = {}
    at += 1
    try:
        while True:
            key, at = decode(text, _next(text, at))
            at = _next(text, at)
            if not isinstance(key, str) or text[at : at + 1] != ":":
                return found
            begins = _next(text, at + 1)
            try:
                found[key], at = decode(text, begins)
            except ValueError:
                inside = _members(text, begins, deep - 1) if deep > 1 else None
                return found if inside is None else {**found, key: inside}
    except ValueError:
        return found


def _next(text: str, at: int) -> int:
    """Return where the next key or value begins."""
    found = _BETWEEN.match(text, at)
    return found.end() if found is not None else at


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def read_object(path: Path, limit: int = MAX_SETTINGS_BYTES) -> dict[str, Any]:
    """Return the object in a JSON file of at most `limit` bytes.

    Raises:
        InputError: when it holds no object.
        OSError: when it cannot be read.

    """
    data = read_bytes(path, limit)
    try:
        value = parse_json(data)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: holds a {type(value).__name__}, expected an object")
    return value


def lines_of(file: BinaryIO, longest: int = MAX_LINE_BYTES) -> Iterator[tuple[int, bytes | None]]:
    """Yield number and bytes of each line of a file; None for a line longer than `longest`, which is skipped."""
    number = 0
    while line := file.readline(longest + 1):
        number += 1
        if len(line) <= longest or line.endswith(b"\n"):
            yield number, line
            continue
        skip_line(file)
        yield number, None


def skip_line(file: BinaryIO, at_a_time: int = 1 << 20) -> int:
    """Skip the rest of a line, however long; return its number of bytes."""
    skipped = 0
    while part := file.readline(at_a_time):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped


def read_lines(path: Path, report: Report) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line number and object of each line of a JSON-lines file; report and skip malformed lines.

    Raises:
        InputError: when it is not a regular file.
        OSError: when it cannot be opened.

    """
    with open_file(path) as file:
        for number, line in lines_of(file):
            if line is None:
                report(path, number, f"the line has more than {MAX_LINE_BYTES} bytes")
                continue
            try:
                value = parse_json(line)
            except InputError as error:
                report(path, number, str(error))
                continue
            if isinstance(value, dict):
                yield number, value
            else:
                report(path, number, f"a {type(value).__name__}, expected an object")
            if file.tell() > MAX_LINES_BYTES:
                report(path, number + 1, f"the file has more than {MAX_LINES_BYTES} bytes; the rest is not read")
                return
