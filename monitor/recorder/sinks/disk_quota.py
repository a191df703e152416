"""Applies the disk quota to a rank's tables and event files, and to the global ones."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from trainsentry.exporters.csv.quota import enforce_quota


def quota_works(session: Any) -> Iterator[Callable[[], Any]]:
    """Yield a deletion job per directory; jobs delete the oldest blocks first, those of incidents last."""
    spared = [(i.first_seen, i.last_seen) for i in session.incidents.incidents.values()]
    curves = session.root / "tensorboard"
    directories = [(session.directory, session.restart, curves / f"rank{session.settings.rank}")]
    if session.global_writers is not None:
        directories.append((session.root / "global", session.global_writers.restart, curves / "global"))
    for directory, restart, events in directories:
        yield partial(
            enforce_quota, directory, session.settings.disk_quota, session.step, spared, restart=restart, events=events
        )
