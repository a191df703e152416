"""Reads dumps: ours, and those of msprobe's two generations. Nothing in them is run."""

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from trainsentry.exporters.foreign_files import NotOurs

_STEP: Final = re.compile(r"step(\d+)$")
_RANK: Final = re.compile(r"(?:rank(\d*)|proc(\d+))$")


@dataclass(frozen=True)
class DumpedTensor:
    """A tensor of a call: its place (`input.0`, `output.0`, `parameters.weight`) and what was said of it."""

    place: str
    facts: dict[str, Any]

    @property
    def file_name(self) -> str | None:
        """The name of its file, if it was saved."""
        name: str | None = self.facts.get("data_name")
        return name


@dataclass(frozen=True)
class RankDump:
    """What one rank dumped in one step; `calls` are the entries of dump.json, in the order they ended."""

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
        """Return where a tensor's file is; None when there is none. The name cannot leave the folder."""
        if tensor.file_name is None:
            return None
        path = self.directory / "dump_tensor_data" / Path(tensor.file_name).name
        return path if path.is_file() else None

    @cached_property
    def parents(self) -> dict[str, str | None]:
        """The tree of calls: each with the one around it."""
        found: dict[str, str | None] = read_object(self.directory / "construct.json")[0]
        return found

    @cached_property
    def stacks(self) -> dict[str, list[str]]:
        """Where each call came from."""
        content, _ = read_object(self.directory / "stack.json")
        found: dict[str, list[str]] = {}
        for key, value in content.items():
            if isinstance(value, list) and len(value) == 2 and isinstance(value[0], list):
                found.update(dict.fromkeys(value[0], value[1]))  # one stack, with the calls that came from it
            elif isinstance(value, list):
                found[key] = value
        return found


def read_dumps(path: Path) -> list[RankDump]:
    """Return the dumps at `path`: of a rank, of a step, or of many steps, in the order of steps and ranks.

    Raises:
        NotOurs: when there is none.

    """
    files = sorted({*path.glob("dump.json"), *path.glob("*/dump.json"), *path.glob("*/*/dump.json")})
    if not files:
        raise NotOurs(f"{path}: holds no dump (expected step<N>/rank<R>/dump.json, or a part of that)")
    found = [_read_rank(file.parent) for file in files]
    return sorted(found, key=lambda d: (d.step, d.rank))


def read_object(path: Path) -> tuple[dict[str, Any], bool]:
    """Return the object in a JSON file, and whether the file was torn: then what stands in whole lines.

    Raises:
        NotOurs: when the file holds no object.

    """
    if not path.is_file():
        return {}, False
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        content = json.loads(text)
    except ValueError:
        return _mend(text, path), True
    if not isinstance(content, dict):
        raise NotOurs(f"{path}: holds a {type(content).__name__}, expected an object")
    return content, False


def _mend(text: str, path: Path) -> dict[str, Any]:
    """Return the members of a torn file that are whole: each line of ours is one."""
    lines = text.split("\n")  # other ends of lines may stand in a text
    while lines:
        body = "\n".join(lines).rstrip().rstrip(",")
        for closing in ("}", "}}", "\n}\n}"):
            try:
                content = json.loads(body + closing)
            except ValueError:
                continue
            return dict(content)
        lines.pop()
    raise NotOurs(f"{path}: is no JSON")


def _read_rank(directory: Path) -> RankDump:
    content, torn = read_object(directory / "dump.json")
    data = content.pop("data", {})
    places = [directory.name, directory.parent.name]
    step = next((int(m[1]) for m in map(_STEP.match, places) if m), 0)
    rank = next((int(m[1] or 0) for m in map(_RANK.match, places) if m), 0)
    names = _long_names(directory / "dump_tensor_data" / "mapping.csv")
    return RankDump(directory, step, rank, {**content, "long_names": names}, data, torn)


def _long_names(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        return {row[0]: row[1] for row in csv.reader(file) if len(row) == 2}


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
            yield DumpedTensor(place, value)
        elif "type" not in value or "value" not in value:
            for key, item in value.items():
                yield from _in(item, f"{place}.{key}")
