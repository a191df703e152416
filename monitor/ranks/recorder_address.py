"""Exchanges the recorders' addresses, and finds the position of this rank's recorder in their tree."""

import ipaddress
import os
import socket
from typing import Any, Final

from trainsentry.collectors.backend import Rendezvous
from trainsentry.collectors.ranks.handshake import secret_for
from trainsentry.monitor.recorder.ranks.tree_position import Address, TreePosition, position_of, purpose_of

LOCAL: Final = "127.0.0.1"


_MASTERS: Final = (("MASTER_ADDR", "MASTER_PORT"), ("MS_SCHED_HOST", "MS_SCHED_PORT"))
"""Environment variables in which launchers of torch and MindSpore name a host that all ranks reach."""


class RecorderAddress:
    """A listening socket for other ranks' recorders; the trainer keeps it open for a recorder's successor."""

    def __init__(self, rank: int) -> None:
        ip = _local_ip()
        self.sock = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET)
        self.sock.bind((ip, 0))
        self.sock.listen(128)
        self.rank = rank
        self.description = {
            "rank": rank,
            "host": socket.gethostname(),
            "ip": ip,
            "port": self.sock.getsockname()[1],
            "salt": os.urandom(16).hex(),
        }

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()


def find_position(
    rendezvous: Rendezvous, recorder_address: RecorderAddress | None, watched: bool
) -> TreePosition | None:
    """Exchange the recorders' addresses; return the position of this rank's recorder in their tree.

    Returns None on a rank that is not watched or cannot listen; it takes part in the exchange nevertheless. Each
    recorder's secret is derived from the rendezvous secret, which all ranks know, so no secret is sent.
    """
    found = rendezvous.exchange(recorder_address.description if watched and recorder_address is not None else None)
    addresses = [_address(description, rank, rendezvous.secret) for rank, description in enumerate(found)]
    if not watched or recorder_address is None:
        return None
    position = position_of(
        recorder_address.rank, [a for a in addresses if a is not None], recorder_address.sock.fileno()
    )
    os.set_inheritable(recorder_address.sock.fileno(), False)
    return position


def _address(description: Any, rank: int, secret: str) -> Address | None:
    """Return the address in a rank's description; None if there is none, or it is invalid."""
    try:
        host, port, salt = str(description["host"])[:255], int(description["port"]), str(description["salt"])
        ip = str(ipaddress.ip_address(description["ip"]))
        if description["rank"] != rank or not 0 < port < 2**16:
            return None
        return Address(rank, host, ip, port, secret_for(secret.encode(), purpose_of(rank), salt))
    except (TypeError, KeyError, ValueError, OverflowError):
        return None


def _local_ip() -> str:
    """Return the IP address at which the run's other hosts reach this one; the loopback address for one host."""
    hosts = int(os.environ.get("GROUP_WORLD_SIZE", "0") or 0)
    master, port = next(((os.environ[h], os.environ.get(p)) for h, p in _MASTERS if os.environ.get(h)), ("", None))
    if not master or hosts == 1:
        return LOCAL
    try:
        found = socket.getaddrinfo(master, int(port or 1), type=socket.SOCK_DGRAM)
        family, kind, protocol, _, target = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # sends nothing: the routing table chooses the local address
            return str(probe.getsockname()[0])
    except (OSError, ValueError):
        return LOCAL
