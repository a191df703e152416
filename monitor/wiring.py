"""Starts the recorder of a run and wires everything to it."""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainsentry.anomaly.incident import Incident
from trainsentry.anomaly.own_detectors import load_detectors
from trainsentry.collectors.guard import Guard
from trainsentry.collectors.series import SeriesTable
from trainsentry.monitor.company import Company
from trainsentry.monitor.config import MonitorConfig
from trainsentry.monitor.errors import ConfigError
from trainsentry.monitor.overhead import Overhead
from trainsentry.monitor.recorder import messages
from trainsentry.monitor.recorder.claim import Claim, release
from trainsentry.monitor.recorder.link import RecorderLink
from trainsentry.monitor.saved_state import detection_for
from trainsentry.monitor.schedule import Schedule
from trainsentry.monitor.starting import claim_restart, describe_run, hello_for
from trainsentry.monitor.step_loop import StepLoop
from trainsentry.monitor.targeted_dump import TargetedDump
from trainsentry.monitor.triggers import Callback, Triggers


@dataclass(frozen=True)
class Run:
    """What a run starts with: `framework` supplies the collectors, `company` is there where there are several ranks."""

    config: MonitorConfig
    framework: Any
    rank: int
    world_size: int
    start_step: int
    company: Company | None
    saved_state: dict[str, Any] | None


@dataclass(frozen=True)
class Shared:
    """What the monitor that the user holds shares with its loop."""

    table: SeriesTable
    guard: Guard
    callbacks: list[Callback]
    incidents: dict[int, Incident]


def start_loop(run: Run, watch: Any, shared: Shared) -> StepLoop:
    """Start the recorder; return the loop that follows the steps of the framework's watched model."""
    config, table, guard = run.config, shared.table, shared.guard
    _check_detectors(config)
    _check_installed(config)
    root = Path(config.output_dir).absolute()
    company = run.company
    claim = claim_restart(root / f"rank{run.rank}", writes=company is None or not company.quiet)
    if claim.rivals:
        guard.warn_once("output_dir", _rivals_in_words(claim, root))
    hello = hello_for(config, root, run.rank, run.start_step, claim, len(config.watched_ranks(run.world_size)))
    if company is not None:
        hello = replace(hello, place=company.place, quiet=company.quiet)
    try:
        link = RecorderLink(hello, table)
    except BaseException:
        release(hello.claim)  # the next start in this directory is the first
        raise
    schedule = company.schedule if company is not None else Schedule(config, several_ranks=run.world_size > 1)
    triggers = Triggers(config.on_incident, schedule, link, guard)
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
    speaks = company.speaks if company is not None else run.rank == config.watched_ranks(run.world_size)[0]
    if speaks:
        described = describe_run(config, run.framework, run.world_size, run.start_step, claim.restart)
        link.send(messages.RUN, run=described)
    link.send(messages.GRAPH, graph=watch.graph())
    if company is not None and watch.data_parallel:
        link.send(messages.DATA_PARALLEL, rank=run.rank)
    if run.saved_state is not None:
        link.send(messages.LOAD_STATE, state=detection_for(run.rank, run.saved_state), step=run.start_step)
    overhead = Overhead(guard, schedule, config.overhead_budget)
    common = company.common if company is not None else None
    place = {"rank": run.rank, "start_step": run.start_step, "same_step": same_step}
    return StepLoop(config, watch, table, link, guard, triggers, schedule, overhead, common, **place)


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
