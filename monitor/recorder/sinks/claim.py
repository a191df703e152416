"""Claims a start's number in a directory, unique among all processes and hosts."""

import contextlib
import json
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

STALE_SECONDS: Final = 600.0
"""Seconds without a renewal after which another host's claim counts as abandoned: ten intervals of renewal."""

RENEW_SECONDS: Final = 60.0
"""Seconds between two renewals of a claim; each costs a shared file system one request."""

_NAME: Final = re.compile(r"\.start\.r(\d+)\.json")


@dataclass(frozen=True)
class Claim:
    """The claim of start number `restart`: a file that exists while the start runs.

    `path` is None where the directory cannot be written. `rivals` describes the runs that already write there; with
    `beside` one of them is another process, so this run's file names carry its number.
    """

    path: Path | None
    restart: int
    rivals: tuple[str, ...] = ()
    beside: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the claim as plain data for the recorder, which renews and releases it."""
        return {"path": None if self.path is None else str(self.path), "holder": _holder()}


def claim_start(directory: Path, lowest: int) -> Claim:
    """Claim a number from `lowest` on, above those of all other claims; remove the claims of dead starts."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        number = max([lowest, *(n + 1 for n in _claims(directory))])
        path = _create(directory, number)
        while path is None:
            number += 1
            path = _create(directory, number)
        rivals = _live_rivals(directory, number, path)
    except OSError:
        return Claim(None, lowest)
    pid = os.getpid()
    texts = tuple(f"process {r.get('pid', '?')} on {r.get('host', 'another host')}" for r in rivals)
    return Claim(path, number, texts, any(r.get("pid") != pid or not _is_on_this_machine(r) for r in rivals))


def renew(claim: dict[str, Any]) -> None:
    """Renew a claim (`to_json`) of a running start; create it again if somebody removed it."""
    if claim.get("path") is None:
        return
    path = Path(claim["path"])
    with contextlib.suppress(OSError):
        try:
            os.utime(path)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(claim["holder"]), encoding="utf-8")


def release(claim: dict[str, Any]) -> None:
    """Remove a claim: its run is over."""
    if claim.get("path") is not None:
        with contextlib.suppress(OSError):
            Path(claim["path"]).unlink()


def _create(directory: Path, number: int) -> Path | None:
    """Create a claim's file; return None if another start has the number."""
    path = directory / f".start.r{number}.json"
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(json.dumps(_holder()))
    except FileExistsError:
        return None
    return path


def _claims(directory: Path) -> dict[int, Path]:
    found = ((_NAME.fullmatch(path.name), path) for path in directory.iterdir())
    return {int(match[1]): path for match, path in found if match is not None}


def _live_rivals(directory: Path, number: int, own_path: Path) -> list[dict[str, Any]]:
    """Return the living holders of other claims; remove the claims of dead ones below `number`."""
    now = own_path.stat().st_mtime  # the file system's clock, which all hosts share
    rivals = []
    for other, path in _claims(directory).items():
        if other == number:
            continue
        with contextlib.suppress(OSError):  # released in between
            age = now - path.stat().st_mtime
            holder = _read(path)
            if _is_alive(holder, age):
                rivals.append(holder)
            elif other < number:
                path.unlink()
    return rivals


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # half-written, or not a claim
        return {}
    return value if isinstance(value, dict) else {}


def _is_alive(holder: dict[str, Any], age: float) -> bool:
    if not _is_on_this_machine(holder):
        return age < STALE_SECONDS
    return _start_time(holder.get("pid")) == holder.get("began")


def _is_on_this_machine(holder: dict[str, Any]) -> bool:
    """Whether a holder's process id refers to this machine, boot and container."""
    return all(holder.get(key) == value for key, value in _machine().items())


def _holder() -> dict[str, Any]:
    return {**_machine(), "pid": os.getpid(), "began": _start_time(os.getpid())}


def _machine() -> dict[str, Any]:
    """Return the identity of this machine, boot and container."""
    boot = pids = ""
    with contextlib.suppress(OSError):  # only Linux has it
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        pids = str(Path("/proc/self/ns/pid").readlink())
    return {"host": platform.node(), "boot": boot, "pids": pids}


def _start_time(pid: Any) -> str | None:
    """Return a process's start time in the system's units, or None if no process has this id."""
    if not isinstance(pid, int) or pid <= 0:
        return None
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        pass
    return "running"
