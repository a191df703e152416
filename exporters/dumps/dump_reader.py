"""Reads dumps, ours and those of msprobe's two generations; runs nothing in them."""

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from trainsentry.collectors.series import writable
from trainsentry.exporters.files.foreign_fields import Kind, checked, sizes, statistic, text, texts
from trainsentry.exporters.files.foreign_files import (
    MAX_OBJECT_BYTES,
    InputError,
    Report,
    complete_members,
    lines_of,
    open_file,
    parse_json,
    read_bytes,
)

_STEP: Final = re.compile(r"step(\d{1,16})$", re.ASCII)
_RANK: Final = re.compile(r"(?:rank(\d{0,9})|proc(\d{1,16}))$", re.ASCII)

MICRO_STEPS: Final = "megatron_micro_step_number"
"""The member of construct.json that counts micro-steps; the calls are then [parent, micro-step]."""

_FACTS: Final[dict[str, Kind]] = {
    **dict.fromkeys(("type", "dtype", "md5", "data_name"), text),
    **dict.fromkeys(("Max", "Min", "Mean", "Norm"), statistic),
    "shape": sizes,
}
"""Members of a tensor's entry that are read."""


@dataclass(frozen=True)
class DumpedTensor:
    """A tensor of a call: its place (`input.0`, `output.0`, `parameters.weight`) and the members of its entry."""

    place: str
    facts: dict[str, Any]

    @property
    def file_name(self) -> str | None:
        """The name of its file, if it was saved."""
        name: str | None = self.facts.get("data_name")
        return name


@dataclass(frozen=True)
class RankDump:
    """The dump of one rank and step; `calls` are the entries of dump.json in the order the calls ended."""

    directory: Path
    step: int
    rank: int
    head: dict[str, Any]
    calls: dict[str, Any]
    torn: bool = False
    _tensors: dict[str, list[DumpedTensor]] = field(default_factory=dict, compare=False)

    def tensors(self, call: str) -> list[DumpedTensor]:
        """Return the tensors of a call."""
        if call not in self._tensors:
            self._tensors[call] = list(_tensors_of(self.calls[call]))
        return self._tensors[call]

    def path_of(self, tensor: DumpedTensor) -> Path | None:
        """Return the path of a tensor's file, or None if it has none; the name cannot leave the folder."""
        if tensor.file_name is None:
            return None
        path = self.directory / "dump_tensor_data" / writable(Path(tensor.file_name).name)
        return path if path.is_file() else None

    @cached_property
    def parents(self) -> dict[str, str | None]:
        """The call tree: each call's parent."""
        parents = ((call, item[0] if _is_numbered(item) else item) for call, item in self._tree.items())
        return {call: parent if isinstance(parent, str) else None for call, parent in parents}

    @cached_property
    def micro_steps(self) -> dict[str, int]:
        """The micro-step of each call that has one: msprobe writes them under Megatron."""
        return {call: item[1] for call, item in self._tree.items() if _is_numbered(item)}

    @cached_property
    def _tree(self) -> dict[str, Any]:
        found = _object_or_nothing(self.directory / "construct.json")
        found.pop(MICRO_STEPS, None)
        return found

    @cached_property
    def stacks(self) -> dict[str, list[str]]:
        """The stack of each call."""
        found: dict[str, list[str]] = {}
        for key, value in _object_or_nothing(self.directory / "stack.json").items():
            if isinstance(value, list) and len(value) == 2 and isinstance(value[0], list):
                found.update(dict.fromkeys(texts(value[0]) or [], texts(value[1]) or []))  # [calls, stack]
            elif isinstance(value, list):
                found[key] = texts(value) or []
        return found


def read_dumps(path: Path, report: Report = lambda *_: None) -> list[RankDump]:
    """Return the dumps at `path` (of a rank, a step, or many steps), sorted by step and rank.

    Dumps that cannot be read, and calls that are not objects, are reported and skipped.

    Raises:
        InputError: when there is no readable dump.

    """
    files = sorted({*path.glob("dump.json"), *path.glob("*/dump.json"), *path.glob("*/*/dump.json")})
    if not files:
        raise InputError(f"{path}: holds no dump (expected step<N>/rank<R>/dump.json, or a part of that)")
    found = []
    for file in files:
        try:
            found.append(_read_rank(file.parent, report))
        except (InputError, OSError) as error:
            if len(files) == 1:
                raise
            report(file, 0, str(error).removeprefix(f"{file}: "))
    if not found:
        raise InputError(f"{path}: none of its {len(files)} dumps can be read")
    return sorted(found, key=lambda d: (d.step, d.rank))


def read_possibly_torn(path: Path) -> tuple[dict[str, Any], bool]:
    """Return the object in a JSON file, and whether the file is truncated; then only members complete to two levels.

    Raises:
        InputError: when the file holds no object.
        OSError: when it cannot be read.

    """
    data = read_bytes(path, MAX_OBJECT_BYTES).decode("utf-8", "replace")
    try:
        content = parse_json(data)
    except InputError as error:
        if "nested" in str(error):
            raise InputError(f"{path}: {error}") from None
        try:
            return complete_members(data, 2), True
        except InputError:
            raise InputError(f"{path}: is {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: holds a {type(content).__name__}, expected an object")
    return content, False


def _is_numbered(item: Any) -> bool:
    """Return whether a call in construct.json has its micro-step beside its parent."""
    return isinstance(item, list) and len(item) == 2 and isinstance(item[1], int) and item[1] >= 0


def _object_or_nothing(path: Path) -> dict[str, Any]:
    """Return the object in a dump's companion file; empty if missing or unreadable."""
    try:
        return read_possibly_torn(path)[0]
    except (InputError, OSError):
        return {}


def _read_rank(directory: Path, report: Report) -> RankDump:
    path = directory / "dump.json"
    content, torn = read_possibly_torn(path)
    data = content.pop("data", {})
    if not isinstance(data, dict):
        raise InputError(f"{path}: data: holds a {type(data).__name__}, expected an object")
    calls = {name: entry for name, entry in data.items() if isinstance(entry, dict)}
    for name in list(data.keys() - calls.keys())[:MAX_REPORTED]:
        report(path, 0, f"{name!r}: is not an object")
    places = [directory.name, directory.parent.name]
    step = next((int(m[1]) for m in map(_STEP.match, places) if m), 0)
    rank = next((int(m[1] or 0) for m in map(_RANK.match, places) if m), 0)
    names = _long_names(directory / "dump_tensor_data" / "mapping.csv")
    return RankDump(directory, step, rank, {**content, "long_names": names}, calls, torn)


MAX_REPORTED: Final = 8
"""Skipped calls of a dump that are reported by name."""


def _long_names(path: Path) -> dict[str, str]:
    found = {}
    try:
        with open_file(path) as file:
            for _, line in lines_of(file):
                fields = next(csv.reader([(line or b"").decode("utf-8", "replace")]), [])
                if len(fields) == 2:
                    found[fields[0]] = fields[1]
    except (InputError, OSError, csv.Error):
        return found
    return found


_GROUPS: Final = {"input_args": "input", "input_kwargs": "input"}


def _tensors_of(content: Any) -> Iterator[DumpedTensor]:
    if not isinstance(content, dict):
        return
    for group, value in content.items():
        yield from _in(value, _GROUPS.get(group) or str(group))


def _in(value: Any, place: str) -> Iterator[DumpedTensor]:
    if isinstance(value, list):
        for i, item in enumerate(value):
            yield from _in(item, f"{place}.{i}")
    elif isinstance(value, dict):
        if "dtype" in value and "shape" in value:
            others = {key: item for key, item in value.items() if key not in _FACTS}
            yield DumpedTensor(place, others | checked(value, _FACTS))
        elif "type" not in value or "value" not in value:
            for key, item in value.items():
                yield from _in(item, f"{place}.{key}")
