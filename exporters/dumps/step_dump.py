"""The dump of one step of one rank, in the layout of msprobe 26.2, each call on disk as soon as it is over."""

import contextlib
import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from trainsentry.collectors.series import writable
from trainsentry.collectors.shared.private_files import make_private_folder
from trainsentry.exporters.dumps.growing_json import GrowingJson, quoted
from trainsentry.exporters.files.json_files import replace_json

TENSORS: Final = "dump_tensor_data"

MAX_NAME: Final = 255
"""Bytes that a file's name may have; longer ones are numbered, and `mapping.csv` says which is which."""

_SPARE_BYTES: Final = 96
"""Bytes kept free behind the names of a stack, for those that follow; doubled when they are used up."""


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
        """Write what is known of a call."""
        self.names.add(name)
        self._data.add(name, content)

    def parent(self, name: str, parent: str | None) -> None:
        """Write a call's place in the tree of calls."""
        if self._construct is not None and name not in self._parents:
            self._parents.add(name)
            self._construct.add(name, parent)

    def stack(self, name: str, number: int, lines: Sequence[str]) -> None:
        """Write where a call came from."""
        if self._stacks is not None:
            self._stacks.add(name, number, lines)

    def tensor_path(self, file_name: str) -> Path:
        """Return the path for a tensor's file, whose folder then exists; the name cannot leave the folder."""
        return self._files.path(file_name)

    def close(self, tail: dict[str, Any] | None = None) -> None:
        """Close the files, dump.json with last members of its own; the stacks are written without room between them."""
        if tail:
            self._data.end(tail)
        for file in (self._data, self._construct, self._stacks):
            if file is not None:
                file.close()

    def discard(self) -> None:
        """Take the dump away: there was nothing to write."""
        self.close()
        for name in ("dump.json", "stack.json", "construct.json"):
            (self.directory / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # tensors, or another rank's dump of the step
            self.directory.rmdir()
            self.directory.parent.rmdir()


class VariableFile:
    """debug.json: variables that a script hands over; see `VariableWriter`."""

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
    """The folder of tensors, made when the first one comes."""

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
    """stack.json: each stack once, with the names of the calls that came from it.

    A name goes into the room behind the earlier ones. When that is used up, the stack is written again with more;
    readers of JSON take the last of equal keys. At the end the file is written anew.
    """

    def __init__(self, path: Path) -> None:
        self._file = GrowingJson(path)
        self._names: dict[int, list[str]] = {}
        self._lines: dict[int, Sequence[str]] = {}
        self._places: dict[int, tuple[int, int]] = {}

    def add(self, name: str, number: int, lines: Sequence[str]) -> None:
        names = self._names.setdefault(number, [])
        names.append(name)
        self._lines[number] = lines
        place, room = self._places.get(number, (0, 0))
        text = f", {quoted(name)}".encode()
        if len(text) > room:
            self._place(number)
            return
        self._file.overwrite(place, text)
        self._places[number] = (place + len(text), room - len(text))

    def _place(self, number: int) -> None:
        names = json.dumps(self._names[number])[:-1]
        room = max(_SPARE_BYTES, len(names))
        # One write: the names, the room, and the lines.
        key, lines = json.dumps(str(number)), json.dumps(list(self._lines[number]))
        begins = self._file.add_text(key, f"[{names}{' ' * room}], {lines}]".encode())
        self._places[number] = (begins + 1 + len(names.encode()), room)

    def close(self) -> None:
        self._file.close()
        whole = {str(n): [names, list(self._lines[n])] for n, names in self._names.items()}
        replace_json(self._file.path, whole)
