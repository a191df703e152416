"""One line in each trainer: `HFCallback`, `LightningCallback`, `AccelerateTracker`, `MonitorStep`.

Each name is loaded, with its trainer's package, when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainsentry.monitor.integrations.accelerator import AccelerateTracker
    from trainsentry.monitor.integrations.huggingface import HFCallback
    from trainsentry.monitor.integrations.lightning_trainer import LightningCallback
    from trainsentry.monitor.mindspore_callbacks import MonitorStep

_HOMES = {
    "AccelerateTracker": "trainsentry.monitor.integrations.accelerator",
    "HFCallback": "trainsentry.monitor.integrations.huggingface",
    "LightningCallback": "trainsentry.monitor.integrations.lightning_trainer",
    "MonitorStep": "trainsentry.monitor.mindspore_callbacks",
}

__all__ = ["AccelerateTracker", "HFCallback", "LightningCallback", "MonitorStep"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'trainsentry.integrations' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
