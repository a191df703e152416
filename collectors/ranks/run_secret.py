"""The run secret, by which ranks authenticate each other: from the environment, or from a private file on this host.

No launcher gives its ranks a secret: anyone on the host can see job numbers and addresses.
"""

import contextlib
import hashlib
import os
import secrets
import socket
import stat
import tempfile
from pathlib import Path
from typing import Final

SECRET: Final = "TRAINSENTRY_SECRET"  # noqa: S105 - the name of a variable
"""Environment variable that holds the run secret, the same on every rank."""

UNAUTHENTICATED: Final = "TRAINSENTRY_MEET_UNAUTHENTICATED"
"""Environment variable: set to 1, ranks without a secret accept anyone who speaks the protocol."""

SHORTEST: Final = 16
"""Characters of the shortest run secret: who records a handshake can try secrets; 16 random letters give 10^22."""

_SECRET_BYTES: Final = 32
"""Bytes of a secret that rank 0 draws."""


def given_secret() -> bytes | None:
    """Return the run secret from the environment; None when it is not set.

    Raises:
        ValueError: when it has fewer than `SHORTEST` characters.

    """
    found = os.environ.get(SECRET, "").strip()
    if found and len(found) < SHORTEST:
        raise ValueError(f"{SECRET}: got {len(found)} characters, allowed: at least {SHORTEST}, the same on every rank")
    return found.encode() or None


def may_be_unauthenticated() -> bool:
    """Return whether the environment allows a rendezvous without a secret."""
    return os.environ.get(UNAUTHENTICATED) == "1"


def is_this_host(host: str) -> bool:
    """Return whether an address belongs to this host."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return True
    except (OSError, UnicodeError):
        pass
    return False


def write_secret(run: str) -> bytes:
    """Draw a secret and write it to a file that only this user's processes on this host can read; return it.

    Raises:
        OSError: when the file cannot be written.

    """
    secret = secrets.token_hex(_SECRET_BYTES).encode()
    descriptor, path = tempfile.mkstemp(prefix="trainsentry-")  # new, and readable by this user alone
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secret)
        Path(path).replace(_path_of(run))  # so no reader sees a part of it
    except OSError:
        Path(path).unlink()
        raise
    return secret


def read_secret(run: str) -> bytes | None:
    """Return the secret that this run's rank 0 has written; None before it has.

    Raises:
        PermissionError: when another user owns the file, others may read it, or it is not a regular file.

    """
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    path = _path_of(run)
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise PermissionError(f"{path} cannot be trusted: {error.strerror}") from None
    try:
        file = os.fstat(descriptor)
        owner = os.geteuid() if hasattr(os, "geteuid") else file.st_uid
        private = file.st_uid == owner and not stat.S_IMODE(file.st_mode) & 0o077 and file.st_nlink <= 1
        if not stat.S_ISREG(file.st_mode) or not private:
            raise PermissionError(f"{path} cannot be trusted: it is not this user's alone")
        return os.read(descriptor, 2 * _SECRET_BYTES)
    finally:
        os.close(descriptor)


def remove_secret(run: str) -> None:
    """Remove the file of `write_secret`: every rank has read it, or is no longer waited for."""
    with contextlib.suppress(OSError):
        _path_of(run).unlink()


def _path_of(run: str) -> Path:
    user = os.geteuid() if hasattr(os, "geteuid") else 0
    name = hashlib.blake2b(run.encode(), digest_size=8).hexdigest()
    return Path(tempfile.gettempdir()) / f"trainsentry-{user}-{name}.secret"
