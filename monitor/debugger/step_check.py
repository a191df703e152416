"""Checks the accuracy of a step's calls at its end: the task run_ut."""

import logging
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from trainsentry.anomaly.accuracy.verdict import ERROR, WARNING
from trainsentry.collectors.calls.call_check import RECORDED
from trainsentry.exporters.dumps.accuracy_csv import AccuracyTables
from trainsentry.exporters.dumps.step_dump import TENSORS
from trainsentry.exporters.short_text import counted
from trainsentry.monitor.accuracy.check_run import SEED, CheckSummary
from trainsentry.monitor.accuracy.dumped_calls import DumpedCall, read_calls
from trainsentry.monitor.accuracy.judged_call import JudgedCall, left_out
from trainsentry.monitor.accuracy.worker import WorkerSettings
from trainsentry.monitor.accuracy.worker_pool import CallWorker, WorkerEndedError
from trainsentry.monitor.debugger.run_ut_config import RunUtBlock

logger = logging.getLogger("trainsentry")

FOLDER: Final = "run_ut_data"
"""Folder in `dump_path` for the tensors of the step, which is emptied when the step was checked."""

CALL_SECONDS: Final = 120.0
"""Seconds that one call may take, forward and backward in the better precision, the worker's start included."""

STEP_SECONDS: Final = 240.0
"""Seconds after which no further call of a step is begun. With `CALL_SECONDS` this stays below the 600 s after which
NCCL's collectives give up waiting for this rank."""

SHOWN_FAILURES: Final = 5
"""Failed calls of a step that the log names; the tables have all."""


class StepCheck:
    """Checks steps of one rank, in a worker process on the CPU that lives as long as the debugger.

    `scratch` is where the step's dump is written. The results of the device are those of the training itself, so the
    worker needs no device. What the worker suffers never reaches the training process.
    """

    def __init__(self, settings: RunUtBlock, dump_path: str, rank: int) -> None:
        self.settings = settings
        self.scratch = Path(dump_path) / FOLDER / f"rank{rank}"
        worker = WorkerSettings(RECORDED, str(self.scratch / TENSORS), SEED, settings.rule, "")
        self._worker = CallWorker(worker, CALL_SECONDS)
        self._saved_bytes = 0

    def check(self, step: int, folder: Path, task: Any) -> CheckSummary:
        """Check a step's calls, write the two tables to `folder`, and remove the step's dump.

        `task` has the chosen calls and what was not recorded of them; see `AccuracyTask`.

        Raises:
            InputError: when the dump of the step cannot be read.
            OSError: when the tables cannot be written, or no process can be started.

        """
        try:
            dump = read_calls(self.scratch / "dump.json")
            tables = AccuracyTables.new(folder, time.strftime("%Y%m%d%H%M%S"))
            errors = self._errors_of(folder, tables.timestamp)
            recorded = {call.name: call for call in dump.calls}
            deadline = time.monotonic() + STEP_SECONDS
            judged = []
            for name, reason in task.calls.items():
                call = recorded.get(name)
                if call is not None:
                    _drop_gradients(call, task.shared_gradients(name))
                found = self._judged(name, reason, call, deadline, errors)
                if not found.message and name in task.without_backward:
                    found = replace(found, message=f"no backward pass: {task.without_backward[name]}")
                tables.write(found.row, found.details)
                judged.append(found)
        finally:
            self.clean()
        summary = CheckSummary(tables.result, judged, dump.damaged, dump.torn)
        _log(step, summary, task.uncounted)
        return summary

    def clean(self) -> None:
        """Remove the step's dump."""
        shutil.rmtree(self.scratch, ignore_errors=True)

    def close(self) -> None:
        """End the worker process, and leave no folder of ours behind."""
        self._worker.end()
        self.clean()
        try:
            self.scratch.parent.rmdir()
        except OSError:
            return  # another rank's dump lies there

    def _judged(
        self, name: str, reason: str, call: DumpedCall | None, deadline: float, errors: Path | None
    ) -> JudgedCall:
        if reason:
            return left_out(name, reason)
        if call is None:
            return left_out(name, "was not recorded whole: it ended in an exception")
        if time.monotonic() > deadline:
            return left_out(name, f"the check of its step took longer than {STEP_SECONDS:g} s")
        saves = errors is not None and self._saved_bytes < self.settings.max_bytes
        try:
            judged = self._worker.check(call, str(errors) if saves else "")
        except WorkerEndedError as ended:  # the CPU's fault, not the device's
            return left_out(name, str(ended), unusable=True)
        if errors is not None and saves and judged.status in (ERROR, WARNING):
            self._note_saved(_bytes_of(name, errors))
        return judged

    def _note_saved(self, size: int) -> None:
        self._saved_bytes += size
        if self._saved_bytes >= self.settings.max_bytes:
            logger.warning(
                "trainsentry: run_ut: %s holds %d bytes: tensors of further failed calls are not kept (max_bytes)",
                self.settings.error_data_path,
                self._saved_bytes,
            )

    def _errors_of(self, folder: Path, timestamp: str) -> Path | None:
        """Return the folder for the tensors of failed calls; None when they are not kept."""
        path = self.settings.error_data_path
        if path is None:
            return None
        return Path(path) / folder.parent.name / folder.name / f"ut_error_data{timestamp}"


def _drop_gradients(call: DumpedCall, places: Sequence[int]) -> None:
    """Drop the recorded gradients at some of a call's tensors."""
    found = call.backward.get("output") if call.backward is not None else None
    for place in places:
        if isinstance(found, list) and place < len(found):
            found[place] = None


def _bytes_of(call: str, folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob(f"{call}.*"))


def _log(step: int, summary: CheckSummary, uncounted: int) -> None:
    for call in summary.failures[:SHOWN_FAILURES]:
        logger.warning("trainsentry: run_ut: step %d: %s: %s: %s", step, call.status, call.call, call.message)
    more = f"; {counted(uncounted, 'more call')} not recorded" if uncounted else ""
    logger.info("trainsentry: run_ut: step %d: %s%s; tables: %s", step, summary.sentence, more, summary.result)
