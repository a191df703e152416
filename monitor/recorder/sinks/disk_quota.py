"""Holds a rank's tables and event files, and those of all ranks together, to the disk quota."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from trainsentry.exporters.csv.quota import enforce_quota


def quota_works(session: Any) -> Iterator[Callable[[], Any]]:
    """Yield the deletions as jobs for the journal: the oldest blocks go first, except those of incidents."""
    spared = [(i.first_seen, i.last_seen) for i in session.incidents.incidents.values()]
    curves = session.root / "tensorboard"
    places = [(session.directory, session.restart, curves / f"rank{session.settings.rank}")]
    if session.global_writers is not None:
        places.append((session.root / "global", session.global_writers.restart, curves / "global"))
    for directory, restart, events in places:
        yield partial(
            enforce_quota, directory, session.settings.disk_quota, session.step, spared, restart=restart, events=events
        )
