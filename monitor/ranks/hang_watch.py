"""Detects a step that does not end, and reports which rank the others wait for.

A thread of the training process checks the clock periodically. It exchanges reports through the run's store, as a
collective may be hanging.
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

from trainsentry.collectors.backend import Store
from trainsentry.exporters.files.json_files import replace_json

logger = logging.getLogger("trainsentry")

FIRST_STEPS: Final = 2
"""Steps without a time limit: they compile kernels and allocate memory."""

REPORT_SECONDS: Final = 5.0
"""Seconds to wait for the ranks' reports, beyond the interval at which each rank checks."""

FRAMEWORKS: Final = frozenset({"torch", "deepspeed", "mindspore"})
"""Package folders; a waiting rank runs their code."""

EXIT_STATUS: Final = 75
"""Exit status of a process that aborts (EX_TEMPFAIL of sysexits.h: try again)."""


class HangWatch:
    """Watches one rank's steps. `report` returns what this rank is doing; ranks exchange reports through `store`."""

    def __init__(
        self,
        seconds: float,
        report: Callable[[], dict[str, Any]],
        store: Store,
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
        self.message: str | None = None
        self._clock = clock
        self._steps = 0
        self._last = clock()
        self._interval = min(seconds / 4, 10.0)
        self._reported = False
        self._reported_steps = -1
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="trainsentry-hang-watch", daemon=True)
        self._thread.start()

    def step_ended(self) -> None:
        """Note that a step has ended; costs two plain stores."""
        self._steps += 1
        self._last = self._clock()

    def close(self) -> None:
        """Stop watching."""
        self._ended.set()

    def _work(self) -> None:
        while not self._ended.wait(self._interval):
            try:
                self._check()
            except Exception:  # the thread's outermost frame: a lost store, a full disk
                logger.exception("trainsentry: hang detection failed and is switched off; training goes on")
                return

    def _check(self) -> None:
        waited = self._clock() - self._last
        if self._steps < FIRST_STEPS or waited < self.seconds or self._reported_steps == self._steps:
            if self._reported and waited < self.seconds:
                self._reported = False
                self._publish("{}")  # the step has ended: withdraw the report
            return
        steps = self._reported_steps = self._steps
        local = {**self.report(), **where_now(), "rank": self.rank, "seconds": round(waited, 1)}
        self._write_stacks()
        self._publish(json.dumps(local))
        self._reported = True
        self._ended.wait(self._interval + REPORT_SECONDS)
        if self._steps != steps:
            return  # the step ended while this thread waited
        reports = {**self._reports(), self.rank: local}
        missing, message = describe_hang(local, reports, self.store.size)
        call = next((r["call"] for r in reports.values() if r.get("call")), None)
        content = {"message": message, "missing": missing, "call": call}
        content |= {key: local[key] for key in ("step", "rank", "seconds")}
        content["reports"] = {str(r): report for r, report in sorted(reports.items())}
        try:
            replace_json(self.directory / "hang.json", content)
        finally:
            self.message = message  # last: whoever reads it finds the file
        logger.critical("trainsentry: %s Stacks are in %s.", message, self.directory / "hang_stacks.txt")
        if self.abort:
            logger.critical("trainsentry: hang_check.abort ends this process")
            os._exit(EXIT_STATUS)

    def _publish(self, text: str) -> None:
        """Put a report into the store; fails silently, as the rank that holds the store may be the one that hangs."""
        with contextlib.suppress(RuntimeError):
            self.store.put(f"hang/{self.rank}", text)

    def _reports(self) -> dict[int, dict[str, Any]]:
        try:
            texts = self.store.all("hang")
        except RuntimeError as error:
            logger.warning("trainsentry: the other ranks' reports on the hang cannot be read: %s", error)
            return {}
        return {rank: found for rank, text in texts.items() if (found := _report_in(text))}

    def _write_stacks(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / "hang_stacks.txt").open("w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file, all_threads=True)


def _report_in(text: str) -> dict[str, Any] | None:
    """Parse a rank's report; return None for a withdrawn or malformed one."""
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
    """Return the current line of the main thread, and whether it is in a framework's code."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return {"where": "nowhere", "in_framework": False}
    path = Path(frame.f_code.co_filename)
    inside = any(part in FRAMEWORKS for part in path.parts)
    return {"where": f"{path.name}:{frame.f_lineno} ({frame.f_code.co_name})", "in_framework": inside}


def describe_hang(
    local: Mapping[str, Any], reports: Mapping[int, Mapping[str, Any]], size: int
) -> tuple[list[int], str]:
    """Return the ranks that the others seem to wait for, and a message; `local` is this rank's report.

    These are the first of: ranks without a report; ranks outside the calls in which the others wait; ranks in an
    earlier step; ranks in the user's code while the others are in the framework's.

    >>> at = {"step": 7, "seconds": 60.0, "where": "train.py:3 (main)", "in_framework": False}
    >>> first = {**at, "rank": 0, "waits_for": "all_reduce number 3 of group 'world'"}
    >>> missing, message = describe_hang(first, {0: first, 1: {**at, "rank": 1, "waits_for": None}}, 2)
    >>> print(missing, message.split(". ")[1])
    [1] Rank 1 is missing: it is in step 7 at train.py:3 (main), while others wait in all_reduce number 3 of group 'world'.
    """  # noqa: E501 - what is printed is one line
    position = local["waits_for"] or local["where"]
    message = f"rank {local['rank']} has been in step {local['step']} for {local['seconds']:.0f} s, at {position}. "
    silent = sorted(set(range(size)) - set(reports))
    if silent:
        cause = "it is dead" if len(silent) == 1 else "they are dead"
        return silent, message + f"{_ranks(silent)} sent no report: {cause}, or stuck where no Python thread runs."
    waiting = {rank: report for rank, report in reports.items() if report["waits_for"]}
    inside = {rank: report for rank, report in reports.items() if report["in_framework"]}
    first = min(report["step"] for report in reports.values())
    slowest = sorted(rank for rank, report in reports.items() if report["step"] == first)
    for present, key in ((waiting, "waits_for"), (inside, "where")):
        if present and len(present) < len(reports):
            others = ", ".join(sorted({report[key] for report in present.values()}))
            absent = [r for r in sorted(reports) if r not in present]
            return absent, message + " ".join(
                f"Rank {r} is missing: it is in step {reports[r]['step']} at {reports[r]['where']}, while others wait "
                f"in {others}."
                for r in absent
            )
        if len(slowest) < len(reports):
            verb = "is" if len(slowest) == 1 else "are"
            return slowest, message + f"{_ranks(slowest)} {verb} behind, in step {first}."
    calls = {rank: report["waits_for"] or report["where"] for rank, report in reports.items()}
    if len(set(calls.values())) > 1:
        places = "; ".join(f"rank {r}: {c}" for r, c in calls.items())
        return [], f"{message}The ranks are in different places: {places}"
    return [], message + "All ranks are in the same place: the network or the communication backend has stopped."


def _ranks(ranks: list[int]) -> str:
    return f"Rank {ranks[0]}" if len(ranks) == 1 else "Ranks " + ", ".join(map(str, ranks))
