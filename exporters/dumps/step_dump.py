"""Writes the dump of one step of one rank in the layout of msprobe 26.2; each call is on disk when it ends.

One system call writes a member of a JSON object and the closing brackets over the old ones, so that a killed process
leaves valid JSON, unless the kill comes within the call and the kernel ends it at a page's end, which is rare: then
`read_possibly_torn` reads what is whole.
"""

import contextlib
import csv
import json
import os
from collections.abc import Iterable, Sequence
from json.encoder import encode_basestring_ascii
from math import isfinite
from pathlib import Path
from typing import Any, Final

import orjson

from trainsentry.collectors.series import writable
from trainsentry.collectors.shared.private_files import make_private_folder
from trainsentry.exporters.files.json_files import replace_json

quoted: Final = encode_basestring_ascii
"""Encodes a text as JSON."""

_encode_with_json = json.JSONEncoder(check_circular=False).encode
"""Values are fresh lists and mappings without cycles, so the check for cycles is off."""


def _encode(value: Any) -> bytes:
    """Encode with orjson, or with json where they differ: orjson writes NaN and Inf as null."""
    try:
        text = orjson.dumps(value)
    except TypeError:  # an integer of more than 64 bits, a lone surrogate
        return _encode_with_json(value).encode()
    return text if b"null" not in text or _is_finite(value) else _encode_with_json(value).encode()


def _is_finite(value: Any) -> bool:
    """Whether nested lists and mappings hold no NaN or Inf; must be fast, as every entry with a null passes here."""
    items: Iterable[Any] = value.values() if isinstance(value, dict) else value
    for item in items if isinstance(value, (dict, list, tuple)) else (value,):
        kind = type(item)
        if kind is float and not isfinite(item):
            return False
        if kind in _CONTAINERS and not _is_finite(item):
            return False
    return True


_CONTAINERS: Final = frozenset({dict, list, tuple})


class GrowingJson:
    """The file of one object; `head` holds its first members, `inside` is the key of the nested object that grows.

    Without `inside` the object itself grows. Non-finite numbers are written as NaN, Infinity or -Infinity.
    """

    def __init__(self, path: Path, head: dict[str, Any] | None = None, inside: str | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.members = 0
        start = json.dumps(head or {}, indent=1)[:-1].rstrip()
        if inside is not None:
            comma = "," if head else ""
            start += f"{comma}\n {json.dumps(inside)}: {{"
        self._closing = b"\n }\n}\n" if inside is not None else b"\n}\n"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        self._end = 0
        self._write(start.encode())

    def add(self, key: str, value: Any) -> int:
        """Add a member; return the file offset of its value."""
        return self.add_text(quoted(key), _encode(value))

    def add_text(self, key: str, value: bytes) -> int:
        """Add a member whose value is JSON text; return the file offset of its value."""
        lead = f"{',' if self.members else ''}\n  {key}: ".encode()
        offset = self._end + len(lead)
        self._write(lead + value)
        self.members += 1
        return offset

    def overwrite(self, offset: int, text: bytes) -> None:
        """Overwrite bytes at a file offset."""
        os.pwrite(self._file, text, offset)

    def end(self, tail: dict[str, Any]) -> None:
        """Close the nested object, and add last members to the outer one."""
        text = json.dumps(tail, indent=1)[1:-2]
        self._closing = b"\n}\n"
        self._write(f"\n }},{text}".encode())

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, text: bytes) -> None:
        data = text + self._closing
        written = os.pwrite(self._file, data, self._end)
        while written < len(data):  # cut short by a signal or a full disk
            written += os.pwrite(self._file, data[written:], self._end + written)
        self._end += len(text)


TENSORS: Final = "dump_tensor_data"

MAX_NAME: Final = 255
"""Bytes of a file name at most; longer names are numbered, and `mapping.csv` maps them."""

_SPARE_BYTES: Final = 96
"""Bytes kept free after the names of a stack for later names; doubled when used up."""


class StepDump:
    """Writes dump.json, stack.json, construct.json and the folder of tensors; see `EntryWriter`."""

    def __init__(self, directory: Path, head: dict[str, Any], *, extra_info: bool = True) -> None:
        self.directory = directory
        self.names: set[str] = set()
        self._parents: set[str] = set()
        self._files = _TensorFiles(directory / TENSORS)
        self._data = GrowingJson(directory / "dump.json", head, "data")
        self._stacks = _StackFile(directory / "stack.json") if extra_info else None
        self._construct = GrowingJson(directory / "construct.json") if extra_info else None

    def entry(self, name: str, content: dict[str, Any]) -> None:
        """Write a call's entry."""
        self.names.add(name)
        self._data.add(name, content)

    def parent(self, name: str, parent: str | None) -> None:
        """Write a call's parent in the call tree."""
        if self._construct is not None and name not in self._parents:
            self._parents.add(name)
            self._construct.add(name, parent)

    def stack(self, name: str, number: int, lines: Sequence[str]) -> None:
        """Write a call's stack."""
        if self._stacks is not None:
            self._stacks.add(name, number, lines)

    def tensor_path(self, file_name: str) -> Path:
        """Return the path for a tensor's file and create its folder; the name cannot leave the folder."""
        return self._files.path(file_name)

    def close(self, tail: dict[str, Any] | None = None) -> None:
        """Close the files; `tail` adds last members to dump.json, and stack.json is rewritten without spare bytes."""
        if tail:
            self._data.end(tail)
        for file in (self._data, self._construct, self._stacks):
            if file is not None:
                file.close()

    def discard(self) -> None:
        """Remove the dump: there was nothing to write."""
        self.close()
        for name in ("dump.json", "stack.json", "construct.json"):
            (self.directory / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # tensors, or another rank's dump of the step
            self.directory.rmdir()
            self.directory.parent.rmdir()


class VariableFile:
    """debug.json: variables that a script saves; see `VariableWriter`."""

    def __init__(self, directory: Path, head: dict[str, Any]) -> None:
        self._files = _TensorFiles(directory / TENSORS)
        self._data = GrowingJson(directory / "debug.json", head, "data")

    def entry(self, name: str, content: Any) -> None:
        """Write a variable."""
        self._data.add(name, content)

    def tensor_path(self, file_name: str) -> Path:
        """Return the path for a tensor's file."""
        return self._files.path(file_name)

    def close(self) -> None:
        """Close the file."""
        self._data.close()


class _TensorFiles:
    """The folder of tensors, created with the first tensor."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._exists = False
        self._long: dict[str, str] = {}

    def path(self, file_name: str) -> Path:
        if not self._exists:
            make_private_folder(self._folder)
            self._exists = True
        name = writable(file_name).replace("/", "_")
        return self._folder / (name if len(name.encode()) <= MAX_NAME else self._short(name))

    def _short(self, name: str) -> str:
        if name not in self._long:
            self._long[name] = f"long_name_{len(self._long)}{Path(name).suffix}"
            with (self._folder / "mapping.csv").open("a", newline="", encoding="utf-8") as file:
                csv.writer(file).writerow([self._long[name], name])
        return self._long[name]


class _StackFile:
    """stack.json: each stack once, with the names of its calls.

    A new name fills the spare bytes after the earlier ones. When they are used up, the stack is written again with
    more; JSON readers take the last of equal keys. Closing rewrites the file without spare bytes.
    """

    def __init__(self, path: Path) -> None:
        self._file = GrowingJson(path)
        self._names: dict[int, list[str]] = {}
        self._lines: dict[int, Sequence[str]] = {}
        self._spare: dict[int, tuple[int, int]] = {}

    def add(self, name: str, number: int, lines: Sequence[str]) -> None:
        names = self._names.setdefault(number, [])
        names.append(name)
        self._lines[number] = lines
        offset, spare = self._spare.get(number, (0, 0))
        text = f", {quoted(name)}".encode()
        if len(text) > spare:
            self._write_stack(number)
            return
        self._file.overwrite(offset, text)
        self._spare[number] = (offset + len(text), spare - len(text))

    def _write_stack(self, number: int) -> None:
        names = json.dumps(self._names[number])[:-1]
        spare = max(_SPARE_BYTES, len(names))
        # One write: names, spare bytes, lines.
        key, lines = json.dumps(str(number)), json.dumps(list(self._lines[number]))
        begins = self._file.add_text(key, f"[{names}{' ' * spare}], {lines}]".encode())
        self._spare[number] = (begins + 1 + len(names.encode()), spare)

    def close(self) -> None:
        self._file.close()
        whole = {str(n): [names, list(self._lines[n])] for n, names in self._names.items()}
        replace_json(self._file.path, whole)
