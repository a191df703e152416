"""The calls of a dump.json that are to be checked."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from trainsentry.collectors.calls.call_selection import is_listed
from trainsentry.exporters.dumps.dump_reader import read_possibly_torn
from trainsentry.exporters.files.foreign_files import InputError

_NO_CALLS: Final = ("Module.", "Cell.", "Jit.")
"""Prefixes of entries that are no calls of an operation."""

DATA: Final = ("auto", "real", "random")


@dataclass(frozen=True)
class DumpedCall:
    """A call: its name without direction, and its entries; `backward` is None where none was dumped."""

    name: str
    forward: dict[str, Any]
    backward: dict[str, Any] | None


@dataclass(frozen=True)
class CallsOfDump:
    """The calls of a dump; `folder` holds its tensors and is None when there are none. `damaged` are bad entries."""

    path: Path
    framework: str
    folder: Path | None
    calls: list[DumpedCall]
    torn: bool
    damaged: list[str] = field(default_factory=list)


def read_calls(path: Path) -> CallsOfDump:
    """Read a dump.json, or the one in a folder.

    Raises:
        InputError: when it is no dump, or the folder holds none or several.
        OSError: when it cannot be read.

    """
    file = _dump_in(path) if path.is_dir() else path
    content, torn = read_possibly_torn(file)
    data = content.get("data")
    if not isinstance(data, dict):
        raise InputError(f"{file}: holds no member data with calls: it is no dump.json")
    damaged: list[str] = []
    calls = [
        DumpedCall(name, entry, _entry(data, f"{name}.backward", damaged))
        for name, entry in _forward_entries(data, damaged)
    ]
    tensors = file.parent / "dump_tensor_data"
    framework = str(content.get("framework", "pytorch"))
    return CallsOfDump(file, framework, tensors if tensors.is_dir() else None, calls, torn, damaged)


def _dump_in(folder: Path) -> Path:
    found = sorted({*folder.glob("dump.json"), *folder.glob("*/dump.json"), *folder.glob("*/*/dump.json")})
    if not found:
        raise InputError(f"{folder}: holds no dump (expected step<N>/rank<R>/dump.json, or a part of that)")
    if len(found) > 1:
        listed = "".join(f"\n  {file}" for file in found[:20])
        raise InputError(f"{folder}: holds {len(found)} dumps; give one of them:{listed}")
    return found[0]


def _forward_entries(data: dict[str, Any], damaged: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for key in data:
        if key.endswith(".forward") and not key.startswith(_NO_CALLS):
            entry = _entry(data, key, damaged)
            if entry is not None:
                yield key.removesuffix(".forward"), entry


def _entry(data: dict[str, Any], key: str, damaged: list[str]) -> dict[str, Any] | None:
    entry = data.get(key)
    if entry is None or isinstance(entry, dict):
        return entry
    damaged.append(f"{key}: its entry is a {type(entry).__name__}, expected an object")
    return None


def chosen(calls: list[DumpedCall], only: list[str], without: list[str], *, differing: bool) -> list[DumpedCall]:
    """Return the calls of some operations (`linear`, or a whole name), in their order.

    `differing` drops a call whose inputs differ from an earlier call's in nothing but their values, as msprobe's
    `--filter_api` does.
    """
    kept, seen = [], set()
    for call in calls:
        if not is_listed(call.name, only, without):
            continue
        shape = (call.name.rpartition(".")[0], json.dumps(_without_values(call.forward), sort_keys=True, default=str))
        if differing and shape in seen:
            continue
        seen.add(shape)
        kept.append(call)
    return kept


_VALUES: Final = frozenset({"Max", "Min", "Mean", "Norm", "md5", "data_name"})


def _without_values(entry: Any) -> Any:
    if isinstance(entry, dict):
        return {key: _without_values(item) for key, item in entry.items() if key not in {*_VALUES, "output"}}
    return [_without_values(item) for item in entry] if isinstance(entry, list) else entry
