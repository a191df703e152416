"""Connects a recorder to its parent in the tree: mutual authentication without blocking."""

import errno
import socket
from typing import Final

from trainsentry.collectors.ranks.handshake import CHALLENGE_BYTES, PROOF_BYTES, Caller, Refused
from trainsentry.monitor.recorder.ranks.framing import FramedConnection
from trainsentry.monitor.recorder.ranks.tree_position import Address, purpose_of

_ON_THE_WAY: Final = frozenset({errno.EINPROGRESS, errno.EALREADY, errno.EWOULDBLOCK})


class ParentCall:
    """One attempt to reach a parent; `connected` once the socket is connected, `failed` when the attempt has failed."""

    def __init__(self, address: Address, rank: int) -> None:
        self.address = address
        self.connected = False
        self.failed = False
        self._caller = Caller(address.secret.encode(), purpose_of(address.rank), rank)
        self._inbox = bytearray()
        self._challenged = False
        self.sock = socket.socket(socket.AF_INET6 if ":" in address.ip else socket.AF_INET)
        self.sock.setblocking(False)

    def advance(self) -> FramedConnection | None:
        """Advance as far as possible without waiting; return the connection once both sides are authenticated."""
        try:
            return self._authenticate() if self.connected or self._connect() else None
        except (OSError, Refused, OverflowError, UnicodeError):  # the last two: an invalid address
            self.close()
            return None

    def close(self) -> None:
        """Abandon the attempt."""
        self.failed = True
        self.sock.close()

    def _connect(self) -> bool:
        state = self.sock.connect_ex((self.address.ip, self.address.port))
        if state in _ON_THE_WAY:
            return False
        if state not in {0, errno.EISCONN}:
            raise OSError(state, "the parent cannot be reached")
        self.connected = True
        self.sock.send(self._caller.hello())
        return True

    def _authenticate(self) -> FramedConnection | None:
        """Read only the bytes of the handshake; later bytes belong to the connection.

        Raises:
            OSError: when the other side has closed.
            Refused: when the other side does not belong to the run.

        """
        while True:
            wanted = PROOF_BYTES if self._challenged else CHALLENGE_BYTES
            try:
                data = self.sock.recv(wanted - len(self._inbox))
            except (BlockingIOError, InterruptedError):
                return None
            if not data:
                raise ConnectionResetError
            self._inbox += data
            if len(self._inbox) < wanted:
                continue
            received = bytes(self._inbox)
            self._inbox.clear()
            if self._challenged:
                return FramedConnection(self.sock, self.address.rank, self._caller.confirm(received))
            self.sock.send(self._caller.answer(received))
            self._challenged = True
