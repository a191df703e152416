"""A start's number in a directory, which no other start takes, in whichever process and on whichever host."""

import contextlib
import json
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

STALE_SECONDS: Final = 600.0
"""Age from which on the claim of another host is taken for left behind: it is renewed ten times as often."""

RENEW_SECONDS: Final = 60.0
"""Seconds between two renewals of a claim, each of which costs a shared file system one request."""

_NAME: Final = re.compile(r"\.start\.r(\d+)\.json")


@dataclass(frozen=True)
class Claim:
    """The claim of start number `restart`: a file that is there while it runs.

    `path` is None where the directory cannot be written. `rivals` are the runs that were writing there already, in
    words; `beside` says that one of them is another process, so that this run's files carry its number.
    """

    path: Path | None
    restart: int
    rivals: tuple[str, ...] = ()
    beside: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the claim as plain data for the recorder, which keeps it and gives it back."""
        return {"path": None if self.path is None else str(self.path), "holder": _holder()}


def claim_start(directory: Path, least: int) -> Claim:
    """Claim the lowest number from `least` on that no start has; what dead ones have left behind is removed."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        number = max([least, *(n + 1 for n in _claims(directory))])
        path = _create(directory, number)
        while path is None:
            number += 1
            path = _create(directory, number)
        rivals = _look_around(directory, number, path)
    except OSError:
        return Claim(None, least)
    mine = os.getpid()
    words = tuple(f"process {r.get('pid', '?')} on {r.get('host', 'another host')}" for r in rivals)
    return Claim(path, number, words, any(r.get("pid") != mine or not _is_here(r) for r in rivals))


def renew(claim: dict[str, Any]) -> None:
    """Show that the run of a claim (`to_json`) goes on; a claim that was removed is made anew."""
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
    """Give a claim back: its run is over."""
    if claim.get("path") is not None:
        with contextlib.suppress(OSError):
            Path(claim["path"]).unlink()


def _create(directory: Path, number: int) -> Path | None:
    """Make a claim's file; return None where another start has the number."""
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


def _look_around(directory: Path, number: int, own: Path) -> list[dict[str, Any]]:
    """Return the holders of claims that are alive; the claims of dead ones below `number` are removed."""
    now = own.stat().st_mtime  # the clock of the file system, which all hosts share
    rivals = []
    for other, path in _claims(directory).items():
        if other == number:
            continue
        with contextlib.suppress(OSError):  # given back meanwhile
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
    except ValueError:  # being written, or what a person put there
        return {}
    return value if isinstance(value, dict) else {}


def _is_alive(holder: dict[str, Any], age: float) -> bool:
    if not _is_here(holder):
        return age < STALE_SECONDS
    return _began(holder.get("pid")) == holder.get("began")


def _is_here(holder: dict[str, Any]) -> bool:
    """Whether a holder's process number means something on this machine."""
    return all(holder.get(key) == value for key, value in _machine().items())


def _holder() -> dict[str, Any]:
    return {**_machine(), "pid": os.getpid(), "began": _began(os.getpid())}


def _machine() -> dict[str, Any]:
    """Return what tells this machine, since it was started, and this container from others."""
    boot = pids = ""
    with contextlib.suppress(OSError):  # only Linux says it
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        pids = str(Path("/proc/self/ns/pid").readlink())
    return {"host": platform.node(), "boot": boot, "pids": pids}


def _began(pid: Any) -> str | None:
    """Return when a process began, in the system's own count, or None where there is none of that number."""
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
