"""Starts a run: claims its number in the directory, starts the recorder and the step loop, sends `run.json`."""

import platform
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

import trainsentry
from trainsentry.anomaly.incident import Incident
from trainsentry.anomaly.rules.user_detectors import load_detectors
from trainsentry.collectors.backend import Framework, ModelWatch
from trainsentry.collectors.guard import Guard
from trainsentry.collectors.native import HOW_TO_COMPILE, is_compiled
from trainsentry.collectors.series import SeriesTable
from trainsentry.exporters.csv.writer import next_restart
from trainsentry.exporters.registry import missing_package, switched_on
from trainsentry.exporters.registry import table as exporter_table
from trainsentry.monitor.config.schema import MonitorConfig
from trainsentry.monitor.control.config_file import ConfigFile
from trainsentry.monitor.control.control_file import NAME as CONTROL
from trainsentry.monitor.errors import ConfigError
from trainsentry.monitor.ranks.consensus import Consensus
from trainsentry.monitor.ranks.rank_group import RankGroup
from trainsentry.monitor.recorder import messages
from trainsentry.monitor.recorder.link import RecorderLink
from trainsentry.monitor.recorder.recorder_settings import RecorderSettings
from trainsentry.monitor.recorder.sinks.claim import Claim, claim_start, release
from trainsentry.monitor.schedule import Schedule
from trainsentry.monitor.trainer.batch_check import BatchCheck
from trainsentry.monitor.trainer.checkpoint_check import CheckpointCheck
from trainsentry.monitor.trainer.overhead import Overhead
from trainsentry.monitor.trainer.saved_state import detection_for
from trainsentry.monitor.trainer.step_loop import StepCallback, StepLoop
from trainsentry.monitor.trainer.targeted_dump import TargetedDump
from trainsentry.monitor.trainer.triggers import Callback, Triggers

_claimed: dict[Path, int] = {}


def claim_restart(directory: Path, *, writes: bool = True) -> Claim:
    """Claim this start's number in a directory that other runs, of this or another process, may share.

    Without `writes` no file is created; the recorder claims a number with its first file.
    """
    number = max(next_restart(directory), _claimed.get(directory, -1) + 1)
    claim = claim_start(directory, number) if writes else Claim(None, number)
    _claimed[directory] = claim.restart
    return claim


def recorder_settings(
    config: MonitorConfig, root: Path, rank: int, start_step: int, claim: Claim, ranks: int = 1
) -> RecorderSettings:
    """Return the settings of this rank's recorder; the `ranks` watched ranks share the false alarms."""
    return RecorderSettings(
        config.model_dump(mode="json"),
        output_dir=str(root),
        rank=rank,
        start_step=start_step,
        detect=config.detect_settings(ranks),
        restart=claim.restart,
        claim=claim.to_json(),
        beside=claim.beside,
    )


def describe_run(
    config: MonitorConfig, framework: Framework, world_size: int, start_step: int, restart: int
) -> dict[str, Any]:
    """Return the content of `run.json`."""
    return {
        "versions": {
            "trainsentry": trainsentry.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        **framework.describe_environment(),
        "configuration": config.model_dump(mode="json"),
        "world_size": world_size,
        "hosts": [platform.node()],
        "start_time": time.time(),
        "start_step": start_step,
        "restart": restart,
    }


def check_number(name: str, value: Any, least: int) -> None:
    """Check an argument of `watch`.

    Raises:
        ValueError: unless it is None or a whole number from `least` on.

    """
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        raise ValueError(f"watch({name}): got {value!r}, allowed: a whole number from {least} on")


NO_COMMON_STOP: Final = "these ranks cannot agree on a stop, and a rank that stops alone leaves the others waiting"
"""The reason why ranks without a connection to each other never stop the training."""


def check_no_common_stop(config: MonitorConfig) -> None:
    """Check that the configuration requests no stop, for ranks that cannot agree on one.

    Raises:
        ConfigError: for `on_incident.stop` or a limit of `overflow_nums`.

    """
    if config.on_incident is not None and config.on_incident.stop:
        raise ConfigError(f"on_incident.stop: got {config.on_incident.stop!r}, allowed: false; {NO_COMMON_STOP}")
    if config.overflow_check is not None and config.overflow_check.overflow_nums > 0:
        nums = config.overflow_check.overflow_nums
        raise ConfigError(f"overflow_check.overflow_nums: got {nums}, allowed: -1; {NO_COMMON_STOP}")


@dataclass(frozen=True)
class RunStart:
    """The facts at the start of a run: `framework` supplies the collectors; `rank_group` is None on a single rank."""

    config: MonitorConfig
    framework: Framework
    rank: int
    world_size: int
    start_step: int
    rank_group: RankGroup | None
    saved_state: dict[str, Any] | None
    config_file: ConfigFile | None = None


@dataclass(frozen=True)
class MonitorView:
    """State that the user's `TrainMonitor` shares with its step loop."""

    table: SeriesTable
    guard: Guard
    callbacks: list[Callback]
    incidents: dict[int, Incident]
    step_callbacks: list[StepCallback]


def start_loop(run: RunStart, watch: ModelWatch, shared: MonitorView) -> StepLoop:
    """Start the recorder; return the loop that follows the steps of the framework's watched model."""
    config, table, guard = run.config, shared.table, shared.guard
    _check_detectors(config)
    check_installed(config)
    root = Path(config.output_dir).absolute()
    rank_group = run.rank_group
    claim = claim_restart(root / f"rank{run.rank}", writes=rank_group is None or not rank_group.quiet)
    _warn(guard, watch, claim, root)
    watched = config.watched_ranks(run.world_size)
    settings = recorder_settings(config, root, run.rank, run.start_step, claim, len(watched))
    if rank_group is not None:
        settings = replace(settings, position=rank_group.position, quiet=rank_group.quiet)
    try:
        link = RecorderLink(settings, table)
    except BaseException:
        release(settings.claim)  # the next start in this directory may have the number
        raise
    schedule = rank_group.schedule if rank_group is not None else Schedule(config, several_ranks=run.world_size > 1)
    consensus = rank_group.consensus if rank_group is not None else Consensus.of_single_rank(schedule, guard)
    triggers = Triggers(config.on_incident, consensus, link, guard)
    triggers.callbacks, triggers.incidents = shared.callbacks, shared.incidents
    triggers.speaks = rank_group is None or run.rank == watched[0]
    triggers.output_dir = config.output_dir
    dump = config.on_incident.dump if config.on_incident else None
    same_step = watch.on_host if dump is None or dump.same_step == "auto" else bool(dump.same_step)
    triggers.dump = _targeted_dump(run, watch, root / settings.file_name("dump"), triggers)
    if run.rank == watched[0]:
        described = describe_run(config, run.framework, run.world_size, run.start_step, claim.restart)
        link.send(messages.RUN, run=described)
    link.send(messages.GRAPH, graph=watch.graph())
    if rank_group is not None and watch.data_parallel:
        link.send(messages.DATA_PARALLEL, rank=run.rank)
    if run.saved_state is not None:
        link.send(messages.LOAD_STATE, state=detection_for(run.rank, run.saved_state), step=run.start_step)
    overhead = Overhead(guard, schedule, config.overhead_budget)
    loop = StepLoop(
        config,
        watch,
        table,
        link,
        guard,
        triggers,
        schedule,
        overhead,
        consensus,
        rank=run.rank,
        start_step=run.start_step,
        same_step=same_step,
        ranks=len(watched),
    )
    loop.step_callbacks = shared.step_callbacks
    loop.checkpoint = _checkpoint_check(run, watch, loop)
    triggers.batches = BatchCheck(watch.last_inputs, lambda: loop.step, link, guard, rank=run.rank)
    triggers.batches.dump = triggers.dump
    if run.rank == watched[0]:
        loop.control.read(root / settings.file_name(CONTROL), run.config_file)
    return loop


def _checkpoint_check(run: RunStart, watch: ModelWatch, loop: StepLoop) -> CheckpointCheck:
    """Return the check of checkpoints; ranks put their fingerprints together if all of them are watched."""
    reader = run.framework.fingerprints(watch) if run.config.detect is not None else None
    all_watched = len(run.config.watched_ranks(run.world_size)) == run.world_size
    store = run.rank_group.rendezvous.store if run.rank_group is not None and all_watched else None
    rank, world = run.rank, run.world_size
    check = CheckpointCheck(reader, store, loop.guard, loop.link, rank=rank, world=world)
    if run.saved_state is not None:
        check.load(run.saved_state["fingerprints"])
    return check


def _targeted_dump(run: RunStart, watch: ModelWatch, directory: Path, triggers: Triggers) -> TargetedDump | None:
    """Return the dump of the suspects' tensors, or None if none is configured."""
    on_incident = run.config.on_incident
    if on_incident is None or on_incident.dump is None:
        return None
    return TargetedDump(
        on_incident.dump,
        directory,
        rank=run.rank,
        capture=watch.capture,
        optimizers=watch.optimizers,
        save=run.framework.saving,
        quota=run.config.disk_quota,
        done=triggers.note_action,
        replay=watch.replay() if on_incident.dump.replay else None,
        overflow_check=on_incident.overflow_check,
    )


def _warn(guard: Guard, watch: ModelWatch, claim: Claim, root: Path) -> None:
    """Say what makes the run slow or mixes its files with those of another."""
    if claim.rivals:
        guard.warn_once("output_dir", _rivals_in_words(claim, root))
    if watch.on_host and not is_compiled():
        text = f"the kernel for host memory was not compiled, so that reading tensors is slow: {HOW_TO_COMPILE}"
        guard.warn_once("kernel for host memory", text)


def _rivals_in_words(claim: Claim, root: Path) -> str:
    """Return the warning that another run writes to the same directory."""
    number, files = claim.restart, "all its files" if claim.beside else "its tables"
    return (
        f"another run is writing to {root} ({', '.join(claim.rivals)}): this run is number {number} there, and the "
        f"names of {files} carry .r{number}. Give each run its own output_dir"
    )


def check_installed(config: MonitorConfig) -> None:
    """Check that every package that the configured exporters need is installed.

    Raises:
        ConfigError: for the first package that is missing; it says how to install it.

    """
    for entry, block in switched_on(config.model_dump(mode="json")["export"], exporter_table()):
        missing = missing_package(entry, block)
        if missing is not None:
            raise ConfigError(missing)


def _check_detectors(config: MonitorConfig) -> None:
    """Load the user's own detectors in the trainer too, so that a mistake is an error before the first step.

    Raises:
        ConfigError: for a detector that cannot be loaded.

    """
    try:
        load_detectors(config.detect.detectors if config.detect is not None else [])
    except ValueError as error:
        raise ConfigError(str(error)) from error
