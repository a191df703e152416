"""Notices that a step does not end, and says which rank the others wait for.

A thread of the training process looks at the clock now and then. It uses the run's store, not a collective: those
are what hangs.
"""

import contextlib
import faulthandler
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from trainsentry.exporters.files.json_files import replace_json

logger = logging.getLogger("trainsentry")

FIRST_STEPS: Final = 2
"""Steps that may take any time: kernels are compiled and memory is laid out in them."""

REPORT_SECONDS: Final = 5.0
"""How long the ranks' reports are waited for beyond the time in which each of them looks."""

FRAMEWORKS: Final = frozenset({"torch", "deepspeed", "mindspore"})
"""Folders whose code a rank that waits for others is in."""

EXIT_STATUS: Final = 75
"""With which a process that is told to abort ends (EX_TEMPFAIL of sysexits.h: try again)."""


class HangWatch:
    """Watches one rank's steps. `report` tells what this rank is doing; `store` is where ranks leave their reports."""

    def __init__(
        self,
        seconds: float,
        report: Callable[[], dict[str, Any]],
        store: Any,
        directory: Path,
        *,
        rank: int,
        abort: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.seconds = seconds
        self.report = report
        self.store = store
        self.directory = directory
        self.rank = rank
        self.abort = abort
        self.told: str | None = None
        self._clock = clock
        self._steps = 0
        self._last = clock()
        self._interval = min(seconds / 4, 10.0)
        self._reported = False
        self._told_of = -1
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="trainsentry-hang-watch", daemon=True)
        self._thread.start()

    def step_ended(self) -> None:
        """Note that a step has ended: two plain stores."""
        self._steps += 1
        self._last = self._clock()

    def close(self) -> None:
        """Watch no more."""
        self._ended.set()

    def _work(self) -> None:
        while not self._ended.wait(self._interval):
            try:
                self._look()
            except Exception:  # a thread's own edge: a store that is gone, a full disk
                logger.exception("trainsentry: the watch for hangs failed and is switched off; training goes on")
                return

    def _look(self) -> None:
        waited = self._clock() - self._last
        if self._steps < FIRST_STEPS or waited < self.seconds or self._told_of == self._steps:
            if self._reported and waited < self.seconds:
                self._reported = False
                self._leave("{}")  # it went on
            return
        steps = self._told_of = self._steps
        own = {**self.report(), **where_now(), "rank": self.rank, "seconds": round(waited, 1)}
        self._write_stacks()
        self._leave(json.dumps(own))
        self._reported = True
        self._ended.wait(self._interval + REPORT_SECONDS)
        if self._steps != steps:
            return  # it went on meanwhile
        reports = {**self._reports(), self.rank: own}
        missing, message = describe_hang(own, reports, self.store.size)
        self.told = message
        call = next((r["call"] for r in reports.values() if r.get("call")), None)
        told = {"message": message, "missing": missing, "call": call}
        told |= {key: own[key] for key in ("step", "rank", "seconds")}
        told["reports"] = {str(r): report for r, report in sorted(reports.items())}
        replace_json(self.directory / "hang.json", told)
        logger.critical("trainsentry: %s Stacks are in %s.", message, self.directory / "hang_stacks.txt")
        if self.abort:
            logger.critical("trainsentry: ending this process, as hang_check.abort asks for")
            os._exit(EXIT_STATUS)

    def _leave(self, text: str) -> None:
        """Leave a word for the others; the rank that holds the board may be the one that hangs or has died."""
        with contextlib.suppress(RuntimeError):
            self.store.put(f"hang/{self.rank}", text)

    def _reports(self) -> dict[int, dict[str, Any]]:
        try:
            words = self.store.all("hang")
        except RuntimeError as error:
            logger.warning("trainsentry: what the other ranks report of the hang cannot be read: %s", error)
            return {}
        return {rank: found for rank, text in words.items() if (found := _report_in(text))}

    def _write_stacks(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / "hang_stacks.txt").open("w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file, all_threads=True)


def _report_in(text: str) -> dict[str, Any] | None:
    """Return the report that a rank has left; None for one that it has taken back, and for what is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_report = (
        isinstance(found, dict)
        and isinstance(found.get("step"), int)
        and isinstance(found.get("in_framework"), bool)
        and isinstance(found.get("where"), str)
        and isinstance(found.get("waits_for"), str | None)
        and isinstance(found.get("call"), dict | None)
    )
    return {"waits_for": None, "call": None, **found} if is_report else None


def where_now() -> dict[str, Any]:
    """Return the line at which the main thread stands, and whether that is in a framework's code."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return {"where": "nowhere", "in_framework": False}
    path = Path(frame.f_code.co_filename)
    inside = any(part in FRAMEWORKS for part in path.parts)
    return {"where": f"{path.name}:{frame.f_lineno} ({frame.f_code.co_name})", "in_framework": inside}


def describe_hang(own: Mapping[str, Any], reports: Mapping[int, Mapping[str, Any]], size: int) -> tuple[list[int], str]:
    """Return which ranks the others seem to wait for, and in words what has stopped.

    That is a rank that has said nothing, else one that is in none of the calls that the others wait in, else one that
    is steps behind, else one that is in the user's code while the others are in the framework's.

    >>> at = {"step": 7, "seconds": 60.0, "where": "train.py:3 (main)", "in_framework": False}
    >>> first = {**at, "rank": 0, "waits_for": "all_reduce number 3 of group 'world'"}
    >>> missing, said = describe_hang(first, {0: first, 1: {**at, "rank": 1, "waits_for": None}}, 2)
    >>> print(missing, said.split(". ")[1])
    [1] Rank 1 is missing: it is in step 7 at train.py:3 (main), while others wait in all_reduce number 3 of group 'world'.
    """  # noqa: E501 - what is printed is one line
    what = own["waits_for"] or own["where"]
    said = f"rank {own['rank']} has been in step {own['step']} for {own['seconds']:.0f} s, at {what}. "
    silent = sorted(set(range(size)) - set(reports))
    if silent:
        return silent, said + f"{_ranks(silent)} said nothing: dead, or stuck where no thread of Python runs."
    waiting = {rank: report for rank, report in reports.items() if report["waits_for"]}
    inside = {rank: report for rank, report in reports.items() if report["in_framework"]}
    first = min(report["step"] for report in reports.values())
    behind = sorted(rank for rank, report in reports.items() if report["step"] == first)
    for present, key in ((waiting, "waits_for"), (inside, "where")):
        if present and len(present) < len(reports):
            others = ", ".join(sorted({report[key] for report in present.values()}))
            absent = [r for r in sorted(reports) if r not in present]
            return absent, said + " ".join(
                f"Rank {r} is missing: it is in step {reports[r]['step']} at {reports[r]['where']}, while others wait "
                f"in {others}."
                for r in absent
            )
        if len(behind) < len(reports):
            return behind, said + f"{_ranks(behind)} is behind, in step {first}."
    calls = {rank: report["waits_for"] or report["where"] for rank, report in reports.items()}
    if len(set(calls.values())) > 1:
        return [], said + "The ranks are in different places: " + "; ".join(f"rank {r}: {c}" for r, c in calls.items())
    return [], said + "All ranks are in the same place: the network, or what carries it, has stopped."


def _ranks(ranks: list[int]) -> str:
    return f"Rank {ranks[0]}" if len(ranks) == 1 else "Ranks " + ", ".join(map(str, ranks))
