"""Writes, in the training process, what a recorder that has died or hung has left in the ring."""

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
"""How long that may take: a ring of 16 MB is written in a second or two, and a disk that hangs must not hold the end
of the training."""


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


def write_remaining(
    hello: RecorderSettings, ring: Ring, state: str, counters: Mapping[str, Any], seconds: float = DRAIN_SECONDS
) -> list[dict[str, Any]] | None:
    """Write what is in the ring, and the last status, which says `state`; return what the session has to tell.

    It is the recorder's own session, without the other ranks' company. None: it failed, or was not done in `seconds`.
    The caller has made sure that no recorder is alive that could write the same rows.
    """
    heard: list[dict[str, Any]] = []
    done = threading.Event()

    def work() -> None:
        try:
            _drain(replace(hello, position=None, quiet=False), ring, state, counters, heard)
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
    hello: RecorderSettings, ring: Ring, state: str, counters: Mapping[str, Any], heard: list[dict[str, Any]]
) -> None:
    from trainsentry.monitor.recorder.loop import Intake
    from trainsentry.monitor.recorder.session import Session

    own = Ring(os.dup(ring.descriptor), ring.size)
    try:
        session = Session(hello, heard.append)
        session.counters = dict(counters)
        Intake(session, own).drain(own.head)
        session.close(state)
    finally:
        own.close()
