"""Reads what a run has written so far, from its files alone, while it goes on or when it is over."""

import csv
import io
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainsentry.exporters.csv_format import SCALARS, parse_file_name

TAIL_BYTES: Final = 1 << 18
"""Bytes read from the end of a file that grows: some thousands of scalars, a few hundred anomalies."""


@dataclass(frozen=True)
class Run:
    """What is known of a run: `run.json`, each rank's `status.json`, and the newest line of each incident."""

    root: Path
    settings: dict[str, Any]
    ranks: dict[int, dict[str, Any]]
    incidents: tuple[dict[str, Any], ...]

    @property
    def is_over(self) -> bool:
        """Whether no rank is at work any more; a status from before the last start says nothing of it."""
        began = self.settings.get("start_time")
        began = float(began) if isinstance(began, (int, float)) else 0.0
        return bool(self.ranks) and all(
            status.get("state", "running") != "running" and float(status.get("updated", began)) >= began
            for status in self.ranks.values()
        )


def read_run(root: Path) -> Run:
    """Return what a run has written; files that are missing or half written are as if there were none."""
    ranks = {}
    for directory in root.glob("rank*"):
        number = re.fullmatch(r"rank(\d+)", directory.name)
        if number is not None and directory.is_dir():
            ranks[int(number[1])] = _object(directory / "status.json")
    newest: dict[Any, dict[str, Any]] = {}
    for line in _objects(root / "incidents.jsonl"):
        newest[line.get("id")] = line
    incidents = sorted(newest.values(), key=lambda i: (i.get("severity") != "critical", -float(i.get("score") or 0)))
    return Run(root, _object(root / "run.json"), dict(sorted(ranks.items())), tuple(incidents))


def tail(path: Path, size: int = TAIL_BYTES) -> list[str]:
    """Return the whole lines at the end of a file, at most `size` bytes of them; nothing where there is no file."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - size))
            data = file.read()
    except OSError:
        return []
    begin = 0 if end <= size else data.find(b"\n") + 1
    return data[begin : data.rfind(b"\n") + 1].decode("utf-8", "replace").splitlines()


def last_scalars(directory: Path, size: int = TAIL_BYTES) -> dict[str, list[tuple[int, float]]]:
    """Return the newest values of a rank's scalars by name: (step, value), ascending, of a step the newest."""
    files = [parse_file_name(path) for path in directory.glob(f"{SCALARS}_*.csv")]
    found: dict[str, dict[int, float]] = {}
    for file in sorted((f for f in files if f is not None), key=lambda f: (f.restart, f.first))[-2:]:
        for fields in csv.reader(io.StringIO("\n".join(tail(file.path, size)))):
            try:
                name, step, _, value = fields
                found.setdefault(name, {})[int(step)] = float(value)
            except ValueError:
                continue  # the header, or a line that somebody has edited
    return {name: sorted(values.items()) for name, values in found.items()}


def anomalies_since(directory: Path, step: int, most: int) -> tuple[list[dict[str, Any]], int]:
    """Return the first `most` anomalies of a rank from `step` on, and how many come after them."""
    found: list[dict[str, Any]] = []
    more = 0
    try:
        with (directory / "anomalies.jsonl").open("rb") as lines:
            for line in lines:
                if len(found) >= most:
                    more += 1
                    continue
                value = _anomaly(line)
                if value is not None and value["step"] >= step:
                    found.append(value)
    except OSError:
        pass
    return found, more


def last_anomalies(directory: Path, size: int = TAIL_BYTES) -> list[dict[str, Any]]:
    """Return the newest anomalies of a rank, oldest first."""
    found = (_anomaly(line) for line in tail(directory / "anomalies.jsonl", size))
    return [value for value in found if value is not None]


def _anomaly(line: str | bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(value, dict) and {"step", "name", "quantity", "score"} <= value.keys()
    return value if whole else None


def _object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _objects(path: Path) -> list[dict[str, Any]]:
    found = []
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found
