"""Starts a run's recorder: its settings, `run.json`, the start's number in a directory, and the wiring to it."""

import platform
import time
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainsentry.anomaly.incident import Incident
from trainsentry.anomaly.rules.user_detectors import load_detectors
from trainsentry.collectors.guard import Guard
from trainsentry.collectors.series import SeriesTable
from trainsentry.exporters.csv.writer import next_restart
from trainsentry.monitor.config.schema import MonitorConfig
from trainsentry.monitor.errors import ConfigError
from trainsentry.monitor.ranks.consensus import Consensus
from trainsentry.monitor.ranks.rank_group import RankGroup
from trainsentry.monitor.recorder import messages
from trainsentry.monitor.recorder.link import RecorderLink
from trainsentry.monitor.recorder.recorder_settings import RecorderSettings
from trainsentry.monitor.recorder.sinks.claim import Claim, claim_start, release
from trainsentry.monitor.schedule import Schedule
from trainsentry.monitor.trainer.overhead import Overhead
from trainsentry.monitor.trainer.saved_state import detection_for
from trainsentry.monitor.trainer.step_loop import StepLoop
from trainsentry.monitor.trainer.targeted_dump import TargetedDump
from trainsentry.monitor.trainer.triggers import Callback, Triggers

_claimed: dict[Path, int] = {}


def claim_restart(directory: Path, *, writes: bool = True) -> Claim:
    """Claim this start's number in a directory, which another run, of this process or of any other, may use too.

    A rank that writes nothing yet leaves no trace there; its recorder claims the number when it begins to.
    """
    number = max(next_restart(directory), _claimed.get(directory, -1) + 1)
    claim = claim_start(directory, number) if writes else Claim(None, number)
    _claimed[directory] = claim.restart
    return claim


def hello_for(
    config: MonitorConfig, root: Path, rank: int, start_step: int, claim: Claim, ranks: int = 1
) -> RecorderSettings:
    """Return what the recorder of this rank is told; `ranks` are watched."""
    return RecorderSettings(
        output_dir=str(root),
        rank=rank,
        statistics=tuple(config.statistics),
        csv_steps_per_file=config.export.csv.steps_per_file if config.export.csv else None,
        report=config.export.report,
        finished_blocks=config.export.csv.finished_blocks if config.export.csv else "csv",
        prometheus=config.export.prometheus.model_dump() if config.export.prometheus else None,
        wandb=config.export.wandb.model_dump() if config.export.wandb else None,
        mlflow=config.export.mlflow.model_dump() if config.export.mlflow else None,
        webhook=config.export.webhook.model_dump() if config.export.webhook else None,
        tensorboard=config.export.tensorboard.model_dump() if config.export.tensorboard else None,
        detect=config.detect.settings(ranks) if config.detect is not None else None,
        max_wait=config.export.max_wait,
        start_step=start_step,
        disk_quota=config.disk_quota,
        ring_size=config.ring_size // 8 * 8,
        overflow_check=config.overflow_check is not None,
        overflow_check_on_incident=config.on_incident is not None and config.on_incident.overflow_check,
        slowest_every=max((block.every for _, block in config.collect if block is not None), default=1),
        restart=claim.restart,
        claim=claim.to_json(),
        beside=claim.beside,
    )


def describe_run(
    config: MonitorConfig, framework: Any, world_size: int, start_step: int, restart: int
) -> dict[str, Any]:
    """Return the content of `run.json`."""
    return {
        "versions": {
            "trainsentry": version("trainsentry"),
            "numpy": version("numpy"),
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
        ValueError: when it is neither None nor a whole number from `least` on.

    """
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        raise ValueError(f"watch({name}): got {value!r}, allowed: a whole number from {least} on")


def check_alone(config: MonitorConfig, world_size: int) -> None:
    """Check that nothing is asked of a rank by itself that only all ranks can do together.

    Raises:
        ConfigError: for a stop, where the ranks of a run cannot agree on one.

    """
    if world_size == 1:
        return
    alone = "the ranks of this framework cannot agree on a stop, and one that stops alone leaves the others waiting"
    if config.on_incident is not None and config.on_incident.stop:
        raise ConfigError(f"on_incident.stop: got {config.on_incident.stop!r}, allowed: false; {alone}")
    if config.overflow_check is not None and config.overflow_check.overflow_nums > 0:
        nums = config.overflow_check.overflow_nums
        raise ConfigError(f"overflow_check.overflow_nums: got {nums}, allowed: -1; {alone}")


@dataclass(frozen=True)
class RunStart:
    """What a run starts with: `framework` supplies the collectors; `rank_group` is None on a single rank."""

    config: MonitorConfig
    framework: Any
    rank: int
    world_size: int
    start_step: int
    rank_group: RankGroup | None
    saved_state: dict[str, Any] | None


@dataclass(frozen=True)
class MonitorView:
    """What the monitor that the user holds shares with its loop."""

    table: SeriesTable
    guard: Guard
    callbacks: list[Callback]
    incidents: dict[int, Incident]


def start_loop(run: RunStart, watch: Any, shared: MonitorView) -> StepLoop:
    """Start the recorder; return the loop that follows the steps of the framework's watched model."""
    config, table, guard = run.config, shared.table, shared.guard
    _check_detectors(config)
    _check_installed(config)
    root = Path(config.output_dir).absolute()
    rank_group = run.rank_group
    claim = claim_restart(root / f"rank{run.rank}", writes=rank_group is None or not rank_group.quiet)
    if claim.rivals:
        guard.warn_once("output_dir", _rivals_in_words(claim, root))
    hello = hello_for(config, root, run.rank, run.start_step, claim, len(config.watched_ranks(run.world_size)))
    if rank_group is not None:
        hello = replace(hello, position=rank_group.position, quiet=rank_group.quiet)
    try:
        link = RecorderLink(hello, table)
    except BaseException:
        release(hello.claim)  # the next start in this directory is the first
        raise
    schedule = rank_group.schedule if rank_group is not None else Schedule(config, several_ranks=run.world_size > 1)
    common = rank_group.common if rank_group is not None else Consensus.of_one(schedule, guard)
    triggers = Triggers(config.on_incident, common, link, guard)
    triggers.callbacks, triggers.incidents = shared.callbacks, shared.incidents
    same_step = watch.on_host
    settings = config.on_incident.dump if config.on_incident else None
    if settings is not None:
        same_step = watch.on_host if settings.same_step == "auto" else bool(settings.same_step)
        triggers.dump = TargetedDump(
            settings,
            root / hello.own_name("dump"),
            rank=run.rank,
            capture=watch.capture,
            optimizers=watch.optimizers,
            save=run.framework.saving,
            quota=config.disk_quota,
            done=triggers.note_action,
            replay=watch.replay() if settings.replay else None,
            overflow_check=config.on_incident is not None and config.on_incident.overflow_check,
        )
    speaks = rank_group.speaks if rank_group is not None else run.rank == config.watched_ranks(run.world_size)[0]
    if speaks:
        described = describe_run(config, run.framework, run.world_size, run.start_step, claim.restart)
        link.send(messages.RUN, run=described)
    link.send(messages.GRAPH, graph=watch.graph())
    if rank_group is not None and watch.data_parallel:
        link.send(messages.DATA_PARALLEL, rank=run.rank)
    if run.saved_state is not None:
        link.send(messages.LOAD_STATE, state=detection_for(run.rank, run.saved_state), step=run.start_step)
    overhead = Overhead(guard, schedule, config.overhead_budget)
    position = {"rank": run.rank, "start_step": run.start_step, "same_step": same_step}
    return StepLoop(config, watch, table, link, guard, triggers, schedule, overhead, common, **position)


def _rivals_in_words(claim: Claim, root: Path) -> str:
    """Return what is said where another run writes to the same directory."""
    own = f"is number {claim.restart} there, and its tables carry .r{claim.restart}"
    if claim.beside:
        own += f", as do its status.r{claim.restart}.json, incidents.r{claim.restart}.jsonl and all its other files"
    return f"another run is writing to {root} ({', '.join(claim.rivals)}): this one {own}. Give each its own output_dir"


def _check_installed(config: MonitorConfig) -> None:
    """Check that what the exporters need is installed.

    Raises:
        ConfigError: when it is not.

    """
    finished = config.export.csv.finished_blocks if config.export.csv is not None else "csv"
    needs = {"parquet": ("pyarrow", "parquet"), "zstd": ("zstandard", "zstd")}
    if finished in needs and find_spec(needs[finished][0]) is None:
        package, extra = needs[finished]
        raise ConfigError(
            f"export.csv.finished_blocks: {finished!r} needs {package}; allowed: pip install 'trainsentry[{extra}]'"
        )
    for name in ("wandb", "mlflow"):
        if getattr(config.export, name) is not None and find_spec(name) is None:
            raise ConfigError(f"export.{name}: {name} is not installed; allowed: pip install {name}")
    if config.export.prometheus is not None and find_spec("prometheus_client") is None:
        raise ConfigError("export.prometheus: needs prometheus-client; allowed: pip install 'trainsentry[prometheus]'")


def _check_detectors(config: MonitorConfig) -> None:
    """Load the user's own detectors here too, where a mistake is seen: the recorder loads them for itself.

    Raises:
        ConfigError: for one that cannot be loaded.

    """
    try:
        load_detectors(config.detect.detectors if config.detect is not None else [])
    except ValueError as error:
        raise ConfigError(str(error)) from error
