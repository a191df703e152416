"""Reads the state of a running or finished run from its files."""

import csv
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainsentry.exporters.csv.format import SCALARS, parse_file_name
from trainsentry.exporters.files.foreign_fields import (
    Kind,
    an_object,
    anything,
    checked,
    finite,
    number,
    objects,
    text,
    texts,
    whole,
)
from trainsentry.exporters.files.foreign_files import (
    InputError,
    Report,
    lines_of,
    open_file,
    parse_json,
    read_lines,
    read_object,
)
from trainsentry.exporters.incident_groups import worst_first

TAIL_BYTES: Final = 1 << 18
"""Bytes read from the end of a growing file: several thousand scalars, a few hundred anomalies."""

NO_STEP_NOTE: Final = "no step was recorded"
"""The `note` in the `status.json` of a rank without any record."""

_SEEN: Final[dict[str, Kind]] = {
    **dict.fromkeys(("name", "quantity", "statistic", "kind", "module", "evidence"), text),
    **dict.fromkeys(("step", "rank"), whole),
    "score": number,
}
_SUSPECTS: Final = objects(_SEEN, frozenset({"name", "quantity", "rank"}))
_INCIDENT: Final[dict[str, Kind]] = {
    **_SEEN,
    **dict.fromkeys(("id", "first_seen", "last_seen", "returns"), whole),
    **dict.fromkeys(("severity", "summary"), text),
    "suspects": _SUSPECTS,
    "actions": texts,
}
_ANOMALY: Final[dict[str, Kind]] = {**_SEEN, **dict.fromkeys(("value", "expected"), number), "order": whole}
_STATUS: Final[dict[str, Kind]] = {
    **dict.fromkeys(("step", "anomalies", "overflow_steps", "skipped_steps", "lag_steps", "dropped_records"), whole),
    **dict.fromkeys(("state", "note", "ended", "why"), text),
    **dict.fromkeys(("updated", "lag_seconds"), finite),
    "cost": an_object(dict.fromkeys(("share", "recent_share", "seconds_a_step", "step_seconds"), finite)),
    "gaps": objects({**dict.fromkeys(("sink", "reason"), text), **dict.fromkeys(("first_step", "last_step"), whole)}),
    "failures": texts,
}
_SETTINGS: Final[dict[str, Kind]] = {
    **dict.fromkeys(("framework", "framework_version", "accelerator"), text),
    "world_size": whole,
    "start_time": finite,
    "hosts": texts,
    "versions": anything(dict),
    "configuration": anything(dict),
}
"""Members that are read of each file; see `foreign_fields`."""


@dataclass(frozen=True)
class RecordedRun:
    """A run's `run.json`, each rank's `status.json`, and the newest line of each incident."""

    root: Path
    settings: dict[str, Any]
    ranks: dict[int, dict[str, Any]]
    incidents: tuple[dict[str, Any], ...]

    @property
    def has_steps(self) -> bool:
        """Whether a rank has recorded a step; one without a status counts as having some."""
        return not self.ranks or any(status.get("note") != NO_STEP_NOTE for status in self.ranks.values())

    @property
    def is_over(self) -> bool:
        """Whether every rank has finished; statuses from before the last start do not count."""
        began = self.settings.get("start_time", 0.0)
        return bool(self.ranks) and all(
            status.get("state", "running") != "running" and status.get("updated", began) >= began
            for status in self.ranks.values()
        )


def read_run(root: Path, report: Report = lambda *_: None) -> RecordedRun:
    """Read a run's files; members of the wrong type are dropped, and `report` gets unreadable files.

    Missing files count as empty.
    """
    ranks = {}
    for directory in root.glob("rank*"):
        found = re.fullmatch(r"rank(\d{1,9})", directory.name, re.ASCII)
        if found is not None and directory.is_dir():
            ranks[int(found[1])] = checked(_object(directory / "status.json", report), _STATUS)
    newest: dict[int | None, dict[str, Any]] = {}
    for line in _incidents(root / "incidents.jsonl", report):
        newest[line.get("id")] = line
    incidents = worst_first(newest.values())
    settings = checked(_object(root / "run.json", report), _SETTINGS)
    return RecordedRun(root, settings, dict(sorted(ranks.items())), tuple(incidents))


def tail(path: Path, size: int = TAIL_BYTES) -> list[str]:
    """Return the complete lines in the last `size` bytes of a file; none if there is no file."""
    try:
        with open_file(path) as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - size))
            data = file.read(size)
    except (InputError, OSError):
        return []
    begin = 0 if end <= size else data.find(b"\n") + 1
    return data[begin : data.rfind(b"\n") + 1].decode("utf-8", "replace").split("\n")[:-1]


def last_scalars(directory: Path, size: int = TAIL_BYTES) -> dict[str, list[tuple[int, float]]]:
    """Return the newest values of a rank's scalars by name, as (step, value) by ascending step, one per step."""
    files = [parse_file_name(path) for path in directory.glob(f"{SCALARS}_*.csv")]
    found: dict[str, dict[int, float]] = {}
    for file in sorted((f for f in files if f is not None), key=lambda f: (f.restart, f.first))[-2:]:
        for line in tail(file.path, size):
            try:
                name, step, _, value = next(csv.reader([line]), [])
                found.setdefault(name, {})[int(step[:16])] = float(value)
            except (ValueError, csv.Error):
                continue  # the header, or an edited line
    return {name: sorted(values.items()) for name, values in found.items()}


def anomalies_since(
    directory: Path, step: int, limit: int, report: Report = lambda *_: None
) -> tuple[list[dict[str, Any]], int]:
    """Return the first `limit` anomalies of a rank from `step` on, and how many follow them."""
    found: list[dict[str, Any]] = []
    more = 0
    path = directory / "anomalies.jsonl"
    try:
        with open_file(path) as file:
            for number_of_line, line in lines_of(file):
                if len(found) >= limit:
                    more += 1
                    continue
                value = _anomaly(line)
                if value is None:
                    report(path, number_of_line, "not an anomaly")
                elif value["step"] >= step:
                    found.append(value)
    except FileNotFoundError:
        pass
    except (InputError, OSError) as error:
        report(path, 0, str(error).removeprefix(f"{path}: "))
    return found, more


def last_anomalies(directory: Path, size: int = TAIL_BYTES) -> list[dict[str, Any]]:
    """Return the newest anomalies of a rank, oldest first."""
    found = (_anomaly(line) for line in tail(directory / "anomalies.jsonl", size))
    return [value for value in found if value is not None]


def _anomaly(line: str | bytes | None) -> dict[str, Any] | None:
    try:
        value = checked(parse_json(line), _ANOMALY) if line is not None else {}
    except InputError:
        return None
    return value if {"step", "name", "quantity"} <= value.keys() else None


def _object(path: Path, report: Report) -> dict[str, Any]:
    try:
        return read_object(path)
    except FileNotFoundError:
        return {}
    except (InputError, OSError) as error:
        report(path, 0, str(error).removeprefix(f"{path}: "))
        return {}


def _incidents(path: Path, report: Report) -> list[dict[str, Any]]:
    try:
        return [checked(line, _INCIDENT) for _, line in read_lines(path, report)]
    except FileNotFoundError:
        return []
    except (InputError, OSError) as error:
        report(path, 0, str(error).removeprefix(f"{path}: "))
        return []
