"""This rank among the others: where its recorder listens, and to whom it sends."""

import ipaddress
import os
import socket
from typing import Any, Final

from trainsentry.collectors.backend import Rendezvous
from trainsentry.collectors.ranks.handshake import secret_for
from trainsentry.monitor.recorder.ranks.tree_position import Address, TreePosition, place_of, purpose_of

LOCAL: Final = "127.0.0.1"


_MASTERS: Final = (("MASTER_ADDR", "MASTER_PORT"), ("MS_SCHED_HOST", "MS_SCHED_PORT"))
"""What launchers of torch and MindSpore call the host that all ranks reach."""


class RecorderAddress:
    """A socket for the recorders of other ranks; kept here so that a successor of a recorder finds it open."""

    def __init__(self, rank: int) -> None:
        ip = _own_ip()
        self.sock = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET)
        self.sock.bind((ip, 0))
        self.sock.listen(128)
        self.rank = rank
        self.told = {
            "rank": rank,
            "host": socket.gethostname(),
            "ip": ip,
            "port": self.sock.getsockname()[1],
            "salt": os.urandom(16).hex(),
        }

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()


def find_place(rendezvous: Rendezvous, recorder_address: RecorderAddress | None, watched: bool) -> TreePosition | None:
    """Tell the other ranks where this one's recorder listens; return its place among them.

    None on a rank that is not watched, or cannot listen; it takes part in the exchange all the same. The secrets of
    the recorders are made of the meeting's, which all ranks know, so that none is sent.
    """
    told = rendezvous.exchange(recorder_address.told if watched and recorder_address is not None else None)
    found = [_address(values, rank, rendezvous.secret) for rank, values in enumerate(told)]
    if not watched or recorder_address is None:
        return None
    position = place_of(recorder_address.rank, [a for a in found if a is not None], recorder_address.sock.fileno())
    os.set_inheritable(recorder_address.sock.fileno(), False)
    return position


def _address(told: Any, rank: int, secret: str) -> Address | None:
    """Return where a rank's recorder listens; None where it has told of none, or of what cannot be."""
    try:
        host, port, salt = str(told["host"])[:255], int(told["port"]), str(told["salt"])
        ip = str(ipaddress.ip_address(told["ip"]))
        if told["rank"] != rank or not 0 < port < 2**16:
            return None
        return Address(rank, host, ip, port, secret_for(secret.encode(), purpose_of(rank), salt))
    except (TypeError, KeyError, ValueError, OverflowError):
        return None


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
