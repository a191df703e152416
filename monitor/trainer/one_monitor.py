"""Closes an older monitor of this process that watches the same model, or writes to the same directory.

A notebook cell that is run again leaves such a monitor: both would read every tensor, and write the same files.
"""

import logging
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainsentry.monitor.trainer.ending import Closable

logger = logging.getLogger("trainsentry")


@dataclass(frozen=True)
class _Watched:
    directory: Path
    models: "list[weakref.ref[Any]]"

    def holds(self, model: Any) -> bool:
        return any(ref() is model for ref in self.models)


_live: "weakref.WeakKeyDictionary[Closable, _Watched]" = weakref.WeakKeyDictionary()


def close_older(monitor: Closable, directory: Path, model: Any) -> None:
    """Note what `monitor` is about to watch, and close other monitors of that model or directory."""
    models = list(model) if isinstance(model, (list, tuple)) else [model]
    place = directory.absolute()
    for other, watched in list(_live.items()):
        if other is monitor:
            continue
        same_model = any(watched.holds(each) for each in models)
        if same_model or watched.directory == place:
            what = "watches this model" if same_model else f"writes to {place}"
            logger.warning("trainsentry: an earlier monitor of this process %s too, so it is closed now", what)
            other.close()
            forget(other)
    known = _live.get(monitor, _Watched(place, []))
    known.models.extend(_references(models))
    _live[monitor] = known


def forget(monitor: Closable) -> None:
    """Note that a monitor is closed."""
    _live.pop(monitor, None)


def _references(models: Iterable[Any]) -> "list[weakref.ref[Any]]":
    return [weakref.ref(model) for model in models]
