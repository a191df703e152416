"""Writes, in the training process, the records that a dead or hung recorder has left in the ring."""

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
"""Seconds that this may take: a ring of 16 MB takes a second or two, and a disk that hangs must not hold up the end of
the training."""


def steps_in(ring: Ring) -> tuple[int, int] | None:
    """Return the first and the last step of the records in a ring that nobody reads; None where there is none."""
    own = Ring(os.dup(ring.descriptor), ring.size)
    try:
        steps = []
        while (message := own.read(own.head)) is not None:
            if message[0] == RECORD:
                steps.append(StepRecord.decode(message[1]).step)
        return (min(steps), max(steps)) if steps else None
    finally:
        own.close()


def write_rest(
    settings: RecorderSettings, ring: Ring, state: str, counters: Mapping[str, Any], seconds: float = DRAIN_SECONDS
) -> list[dict[str, Any]] | None:
    """Write the records in the ring and a last status with `state`; return the session's messages to the trainer.

    The recorder's own session does this, without the other ranks. The result is None when it failed or took more than
    `seconds`. The caller has made sure that no recorder is alive that could write the same rows.
    """
    heard: list[dict[str, Any]] = []
    done = threading.Event()

    def work() -> None:
        try:
            _drain(replace(settings, position=None, quiet=False), ring, state, counters, heard)
            done.set()
        except Exception:
            logger.exception("trainsentry: what the recorder has left cannot be written")

    thread = threading.Thread(target=work, name="trainsentry-drain", daemon=True)
    try:
        thread.start()
        thread.join(seconds)
    except RuntimeError:  # an interpreter that is ending starts no threads
        work()
    return heard if done.is_set() else None


def _drain(
    settings: RecorderSettings, ring: Ring, state: str, counters: Mapping[str, Any], heard: list[dict[str, Any]]
) -> None:
    from trainsentry.monitor.recorder.loop import Intake
    from trainsentry.monitor.recorder.session import Session

    own = Ring(os.dup(ring.descriptor), ring.size)
    try:
        session = Session(settings, heard.append)
        session.counters = dict(counters)
        Intake(session, own).drain(own.head)
        session.close(state)
    finally:
        own.close()
