"""Writes, in the training process, the records that a dead or hung recorder left in the ring."""

import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from trainsentry.collectors.record import StepRecord
from trainsentry.monitor.recorder.messages import RECORD
from trainsentry.monitor.recorder.recorder_settings import RecorderSettings
from trainsentry.monitor.recorder.ring import Ring

logger = logging.getLogger("trainsentry")

DRAIN_SECONDS: Final = 60.0
"""Seconds that draining may take: a ring of 16 MB takes one or two, and a hung disk must not delay the end of
training."""


def steps_in(ring: Ring) -> tuple[int, int] | None:
    """Return the first and the last step of the records in a ring without a reader; None if it has no record."""
    reader = Ring(os.dup(ring.descriptor), ring.size)
    try:
        steps = []
        while (message := reader.read(reader.head)) is not None:
            if message[0] == RECORD:
                steps.append(StepRecord.decode(message[1]).step)
        return (min(steps), max(steps)) if steps else None
    finally:
        reader.close()


def write_remaining(
    settings: RecorderSettings, ring: Ring, state: str, counters: Mapping[str, Any], seconds: float = DRAIN_SECONDS
) -> list[dict[str, Any]] | None:
    """Write the ring's records and a last status with `state`; return the session's messages.

    The session is a recorder's, without the other ranks. Returns None if it fails or takes longer than `seconds`. The
    caller must ensure that no recorder is alive that could write the same rows.
    """
    sent: list[dict[str, Any]] = []
    done = threading.Event()

    def work() -> None:
        try:
            _drain(replace(settings, position=None, quiet=False), ring, state, counters, sent)
            done.set()
        except Exception:
            logger.exception("trainsentry: the records that the recorder left cannot be written")

    thread = threading.Thread(target=work, name="trainsentry-drain", daemon=True)
    try:
        thread.start()
        thread.join(seconds)
    except RuntimeError:  # no threads at interpreter exit
        work()
    return sent if done.is_set() else None


def _drain(
    settings: RecorderSettings, ring: Ring, state: str, counters: Mapping[str, Any], sent: list[dict[str, Any]]
) -> None:
    from trainsentry.monitor.recorder.loop import Intake
    from trainsentry.monitor.recorder.session import Session

    reader = Ring(os.dup(ring.descriptor), ring.size)
    try:
        session = Session(settings, sent.append)
        session.counters = dict(counters)
        Intake(session, reader).drain(reader.head)
        session.close(state)
    finally:
        reader.close()
