"""What a run starts with: the recorder's settings, the description in `run.json`, and its number in a directory."""

import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trainsentry.exporters.csv_writer import next_restart
from trainsentry.monitor.config import MonitorConfig
from trainsentry.monitor.errors import ConfigError
from trainsentry.monitor.recorder.claim import Claim, claim_start
from trainsentry.monitor.recorder.hello import Hello

_claimed: dict[Path, int] = {}


def claim_restart(directory: Path, *, writes: bool = True) -> Claim:
    """Claim this start's number in a directory, which another run, of this process or of any other, may use too.

    A rank that writes nothing yet leaves no trace there; its recorder claims the number when it begins to.
    """
    number = max(next_restart(directory), _claimed.get(directory, -1) + 1)
    claim = claim_start(directory, number) if writes else Claim(None, number)
    _claimed[directory] = claim.restart
    return claim


def hello_for(config: MonitorConfig, root: Path, rank: int, start_step: int, claim: Claim, ranks: int = 1) -> Hello:
    """Return what the recorder of this rank is told; `ranks` are watched."""
    return Hello(
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
