"""Checks the calls of a dump and writes the tables as it goes."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from trainsentry.anomaly.accuracy.verdict import ERROR, PASS, SKIP, WARNING
from trainsentry.exporters.dumps.accuracy_csv import AccuracyTables
from trainsentry.exporters.files.foreign_files import InputError
from trainsentry.exporters.short_text import counted
from trainsentry.monitor.accuracy.dumped_calls import CallsOfDump, DumpedCall, chosen, read_calls
from trainsentry.monitor.accuracy.judged_call import JudgedCall, read_back
from trainsentry.monitor.accuracy.worker import WorkerSettings
from trainsentry.monitor.accuracy.worker_pool import CALL_SECONDS, check_here, check_shared

SEED: Final = 1234
"""Seed of random tensors, as of msprobe's `seed_all`."""


FRAMEWORKS: Final = ("pytorch", "mindspore", "mindtorch")
"""The frameworks whose calls are checked, as a dump names them; mindtorch is MSAdapter and its successors."""


MSPROBE: Final = "msprobe"
"""The rule of msprobe's tool for the framework of the dump."""

RULES_OF_MSPROBE: Final = {"pytorch": "run_ut", "mindspore": "mindspore", "mindtorch": "mindspore"}


@dataclass(frozen=True)
class CheckOptions:
    """What to check and how; see `trainsentry check --help`.

    `processes` of 0 checks in this process. `errors_in` is the folder that a folder of failed calls is made in.
    """

    dump: Path
    out: Path
    data: str = "auto"
    seed: int = SEED
    rule: str = "standards"
    save_errors: bool = False
    errors_in: Path | None = None
    resume: Path | None = None
    processes: int = 1
    devices: Sequence[str] = ("cpu",)
    only: list[str] = field(default_factory=list)
    without: list[str] = field(default_factory=list)
    differing: bool = False
    call_seconds: float = CALL_SECONDS


@dataclass(frozen=True)
class CheckSummary:
    """The outcome: all calls in the order of the dump, damaged entries, and the tables."""

    result: Path
    calls: list[JudgedCall]
    damaged: list[str]
    torn: bool

    @property
    def counts(self) -> Counter[str]:
        """Number of calls by status."""
        return Counter(call.status for call in self.calls)

    @property
    def failures(self) -> list[JudgedCall]:
        """Calls that failed, the worst first: errors before warnings, then by how far they miss their limit."""
        found = [call for call in self.calls if call.status in (ERROR, WARNING)]
        return sorted(found, key=lambda call: (call.status != ERROR, -call.excess))

    @property
    def unusable(self) -> list[JudgedCall]:
        """Calls that could not be checked because of what the dump holds."""
        return [call for call in self.calls if call.unusable]

    @property
    def skipped(self) -> list[JudgedCall]:
        """Calls that say nothing about accuracy."""
        return [call for call in self.calls if call.status == SKIP and not call.unusable]

    @property
    def sentence(self) -> str:
        """How many calls there were, and what became of them."""
        counts, bad = self.counts, len(self.unusable) + len(self.damaged)
        return (
            f"{counted(len(self.calls), 'call')}: {self.passed} passed, {counts[ERROR]} failed, "
            f"{counts[WARNING]} with a warning, {len(self.skipped)} not compared, {bad} could not be checked"
        )

    @property
    def is_clean(self) -> bool:
        """Whether nothing failed and everything could be read."""
        return not (self.counts[ERROR] or self.unusable or self.damaged or self.torn)

    @property
    def passed(self) -> int:
        """Number of calls that passed."""
        return self.counts[PASS]


Progress = Callable[[int, int, str], None]
"""Receives the number of calls done, of all calls, and the name of the last one."""


def run_check(options: CheckOptions, progress: Progress = lambda *_: None) -> CheckSummary:
    """Check the calls of a dump.

    Raises:
        InputError: for a dump, a table or a device that cannot be used.
        OSError: when the tables cannot be written.

    """
    dump = read_calls(options.dump)
    calls = chosen(dump.calls, options.only, options.without, differing=options.differing)
    settings = _settings(options, dump, calls)
    tables = (
        AccuracyTables.new(options.out, _now()) if options.resume is None else AccuracyTables.resume(options.resume)
    )
    if options.save_errors:
        folder = (options.errors_in or options.out) / f"ut_error_data{tables.timestamp}"
        settings = replace(settings, errors=str(folder))
    waiting = [call for call in calls if call.name not in tables.done]
    judged = {name: read_back(row) for name, row in tables.done.items()}
    for number, found in enumerate(_checked(waiting, settings, options), start=len(calls) - len(waiting) + 1):
        tables.write(found.row, found.details)
        judged[found.call] = found
        progress(number, len(calls), found.call)
    ordered = [judged[call.name] for call in calls]
    return CheckSummary(tables.result, ordered, dump.damaged, dump.torn)


def _checked(calls: list[DumpedCall], settings: WorkerSettings, options: CheckOptions) -> Iterator[JudgedCall]:
    if options.processes == 0:
        return check_here(calls, settings)
    return check_shared(calls, settings, options.devices, options.processes, options.call_seconds)


def _settings(options: CheckOptions, dump: CallsOfDump, calls: list[DumpedCall]) -> WorkerSettings:
    if dump.framework not in FRAMEWORKS:
        raise InputError(f"{dump.path}: holds calls of {dump.framework}; allowed: {', '.join(FRAMEWORKS)}")
    if not calls:
        raise InputError(f"{dump.path}: holds no forward call to check")
    if options.data == "real" and dump.folder is None:
        raise InputError(f"{dump.path}: has no dump_tensor_data beside it; --data random draws the tensors")
    real = options.data == "real" or (options.data == "auto" and dump.folder is not None)
    rule = RULES_OF_MSPROBE[dump.framework] if options.rule == MSPROBE else options.rule
    folder = str(dump.folder) if real else ""
    return WorkerSettings(options.devices[0], folder, options.seed, rule, "", dump.framework)


def _now() -> str:
    return time.strftime("%Y%m%d%H%M%S")
