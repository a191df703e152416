"""A recorder's position in the tree of recorders: its children and its parent."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

FANOUT: Final = 8
"""Child hosts per host: three levels connect 584 hosts, and none has more than 8 children besides its own ranks."""


@dataclass(frozen=True)
class Address:
    """Where a rank's recorder listens, its host, and the secret that authenticates callers; no call transmits it."""

    rank: int
    host: str
    ip: str
    port: int
    secret: str


@dataclass(frozen=True)
class TreePosition:
    """A position in the tree of `ranks`; `parent` is None at the root.

    `heads` is True for the first rank of a host.
    """

    rank: int
    ranks: tuple[int, ...]
    children: tuple[int, ...]
    parent: Address | None
    secret: str
    descriptor: int = -1
    heads: bool = True

    @classmethod
    def decode(cls, values: dict[str, Any]) -> "TreePosition":
        """Rebuild a position from plain data."""
        parent = values["parent"]
        return cls(
            values["rank"],
            tuple(values["ranks"]),
            tuple(values["children"]),
            Address(**parent) if parent is not None else None,
            values["secret"],
            values["descriptor"],
            values["heads"],
        )


def purpose_of(rank: int) -> str:
    """Return the purpose of a recorder's secret, which both sides of a connection state."""
    return f"recorder of rank {rank}"


def position_of(rank: int, addresses: Sequence[Address], descriptor: int = -1) -> TreePosition:
    """Return a rank's position in the tree: ranks of a host send to its first rank, and the first ranks form a tree.

    >>> at = [Address(r, f"host{r // 2}", "", 0, "") for r in range(6)]
    >>> [position_of(r, at).parent and position_of(r, at).parent.rank for r in range(6)]
    [None, 0, 0, 2, 0, 4]
    """
    known = {address.rank: address for address in addresses}
    heads: dict[str, int] = {}
    for address in sorted(addresses, key=lambda a: a.rank):
        heads.setdefault(address.host, address.rank)
    order = list(heads.values())
    parents = {}
    for address in addresses:
        head = heads[address.host]
        position = order.index(head) if address.rank == head else -1
        if position != 0:
            parents[address.rank] = head if position < 0 else order[(position - 1) // FANOUT]
    children = tuple(sorted(r for r, parent in parents.items() if parent == rank))
    parent = known[parents[rank]] if rank in parents else None
    heads_host = heads[known[rank].host] == rank
    return TreePosition(rank, tuple(sorted(known)), children, parent, known[rank].secret, descriptor, heads_host)
