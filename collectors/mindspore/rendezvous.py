"""Rendezvous of MindSpore's ranks, over sockets because each of the framework's own exchanges waits for the device."""

import itertools
import logging
import os
from typing import Final

from trainsentry.collectors.mindspore.runtime import rank_and_world_size
from trainsentry.collectors.ranks.rendezvous import Endpoint, SocketRendezvous
from trainsentry.collectors.ranks.rendezvous import meet as meet_at

logger = logging.getLogger("trainsentry")

_numbers = itertools.count()
"""Numbers of rendezvous; the same on every rank, as all take part in the same order."""

MEET_AT: Final = "TRAINSENTRY_MEET_AT"
"""Environment variable: `host:port` of rank 0, or `off`, for runs that were started without a scheduler."""


def meet() -> SocketRendezvous | None:
    """Wait until every rank has joined; return None for a single rank.

    Also returns None when the ranks do not find each other; each is then watched by itself.
    """
    rank, size = rank_and_world_size()
    if size == 1:
        return None
    endpoint = _endpoint()
    if endpoint is None:
        if os.environ.get(MEET_AT) != "off":
            _warn_alone(f"neither MS_SCHED_HOST and MS_SCHED_PORT nor {MEET_AT} give the address of rank 0")
        return None
    try:
        return meet_at(endpoint, rank, size)
    except RuntimeError as error:
        _warn_alone(str(error))
        return None


def _endpoint() -> Endpoint | None:
    """Return the endpoint of rank 0, which MindSpore's launcher runs on the scheduler's host; None when unknown or off.

    Raises:
        ValueError: when `TRAINSENTRY_MEET_AT` is neither `host:port` nor `off`.

    """
    named = os.environ.get(MEET_AT)
    if named == "off":
        return None
    if named:
        host, _, port = named.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"{MEET_AT}: got {named!r}, allowed: host:port of rank 0, or off")
        return Endpoint.at(host.strip("[]"), port, next(_numbers))
    host, port = os.environ.get("MS_SCHED_HOST", ""), os.environ.get("MS_SCHED_PORT", "")
    return Endpoint.at(host, port, next(_numbers)) if host and port else None


def _warn_alone(why: str) -> None:
    logger.warning("trainsentry: each rank is watched by itself: %s", why)
