"""Where several ranks of MindSpore meet: over sockets, for every exchange of the framework waits for the device."""

import itertools
import logging
import os
from typing import Final

from trainsentry.collectors.mindspore.runtime import rank_and_world_size
from trainsentry.collectors.ranks.rendezvous import Endpoint, SocketRendezvous
from trainsentry.collectors.ranks.rendezvous import meet as meet_at

logger = logging.getLogger("trainsentry")

_numbers = itertools.count()
"""The same on every rank: meetings are held in one order."""

MEET_AT: Final = "TRAINSENTRY_MEET_AT"
"""Names `host:port` of rank 0, or `off`, for runs that were not started with a scheduler."""


def meet() -> SocketRendezvous | None:
    """Wait until every rank has come; return None for one rank, and where the ranks do not find each other.

    Then each is watched by itself.
    """
    rank, size = rank_and_world_size()
    if size == 1:
        return None
    endpoint = _endpoint()
    if endpoint is None:
        if os.environ.get(MEET_AT) != "off":
            _tell_alone(f"neither MS_SCHED_HOST and MS_SCHED_PORT nor {MEET_AT} say where they could meet")
        return None
    try:
        return meet_at(endpoint, rank, size)
    except RuntimeError as error:
        _tell_alone(str(error))
        return None


def _endpoint() -> Endpoint | None:
    """Return where rank 0 is looked for: MindSpore's launcher runs it on the host of the scheduler.

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


def _tell_alone(why: str) -> None:
    logger.warning("trainsentry: each rank is watched by itself: %s", why)
