"""This rank among the others: where its recorder listens, and to whom it sends."""

import os
import secrets
import socket
from dataclasses import asdict
from typing import Any, Final

from trainsentry.monitor.recorder.place import Address, Place, place_of

LOCAL: Final = "127.0.0.1"


_MASTERS: Final = (("MASTER_ADDR", "MASTER_PORT"), ("MS_SCHED_HOST", "MS_SCHED_PORT"))
"""What launchers of torch and MindSpore call the host that all ranks reach."""


class Listening:
    """A socket for the recorders of other ranks; kept here so that a successor of a recorder finds it open."""

    def __init__(self, rank: int) -> None:
        ip = _own_ip()
        self.sock = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET)
        self.sock.bind((ip, 0))
        self.sock.listen(128)
        port = self.sock.getsockname()[1]
        self.address = Address(rank, socket.gethostname(), ip, port, secrets.token_hex(16))

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()


def find_place(meeting: Any, listening: Listening | None, watched: bool) -> Place | None:
    """Tell the other ranks where this one's recorder listens; return its place among them.

    None on a rank that is not watched, or cannot listen; it takes part in the exchange all the same.
    """
    told = meeting.exchange(asdict(listening.address) if watched and listening is not None else None)
    addresses = [Address(**values) for values in told if values is not None]
    if not watched or listening is None:
        return None
    place = place_of(listening.address.rank, addresses, listening.sock.fileno())
    os.set_inheritable(listening.sock.fileno(), False)
    return place


def _own_ip() -> str:
    """Return the address under which other hosts of the run reach this one; the loop's where there is one host."""
    hosts = int(os.environ.get("GROUP_WORLD_SIZE", "0") or 0)
    master, port = next(((os.environ[h], os.environ.get(p)) for h, p in _MASTERS if os.environ.get(h)), ("", None))
    if not master or hosts == 1:
        return LOCAL
    try:
        found = socket.getaddrinfo(master, int(port or 1), type=socket.SOCK_DGRAM)
        family, kind, protocol, _, target = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # sends nothing: it asks the routes which address would be used
            return str(probe.getsockname()[0])
    except (OSError, ValueError):
        return LOCAL
