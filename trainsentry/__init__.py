"""trainsentry watches a training run from inside, names the first culprit, and keeps the proof.

The public names are loaded when they are first used, so that `import trainsentry` imports no framework and
stays light.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainsentry.anomaly.incident import Incident
    from trainsentry.exporters.convert.csv2tb import csv2tb
    from trainsentry.exporters.convert.msprobe_csv2tb import csv2tensorboard_by_step
    from trainsentry.monitor.config.schema import MonitorConfig
    from trainsentry.monitor.debugger.precision_debugger import PrecisionDebugger
    from trainsentry.monitor.errors import ConfigError, OverflowLimitReached, TrainingStopped
    from trainsentry.monitor.msprobe.trainer_mon import TrainerMon
    from trainsentry.monitor.seeding import seed_all
    from trainsentry.monitor.train_monitor import TrainMonitor

__version__ = "0.1.0"

_HOMES = {
    "TrainMonitor": "trainsentry.monitor.train_monitor",
    "TrainerMon": "trainsentry.monitor.msprobe.trainer_mon",
    "MonitorConfig": "trainsentry.monitor.config.schema",
    "ConfigError": "trainsentry.monitor.errors",
    "TrainingStopped": "trainsentry.monitor.errors",
    "OverflowLimitReached": "trainsentry.monitor.errors",
    "Incident": "trainsentry.anomaly.incident",
    "PrecisionDebugger": "trainsentry.monitor.debugger.precision_debugger",
    "csv2tb": "trainsentry.exporters.convert.csv2tb",
    "csv2tensorboard_by_step": "trainsentry.exporters.convert.msprobe_csv2tb",
    "seed_all": "trainsentry.monitor.seeding",
}

__all__ = [
    "ConfigError",
    "Incident",
    "MonitorConfig",
    "OverflowLimitReached",
    "PrecisionDebugger",
    "TrainMonitor",
    "TrainerMon",
    "TrainingStopped",
    "__version__",
    "csv2tb",
    "csv2tensorboard_by_step",
    "seed_all",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'trainsentry' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
