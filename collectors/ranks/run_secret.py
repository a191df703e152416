"""The secret by which the ranks of a run know each other: from the environment, or left for this user on this host.

No launcher hands its ranks a secret of its own: job numbers and addresses are known to whoever looks at the host.
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
"""Holds the secret of a run, the same on every rank."""

UNAUTHENTICATED: Final = "TRAINSENTRY_MEET_UNAUTHENTICATED"
"""Set to 1, ranks without a secret take whoever knows the protocol for one of them."""

SHORTEST: Final = 16
"""Characters of a secret: who hears a rank call can try secrets out; of 16 random letters there are 10^22."""

_LEFT_BYTES: Final = 32
"""Bytes of a secret that is made here."""


def given_secret() -> bytes | None:
    """Return the secret that the environment holds; None where it holds none.

    Raises:
        ValueError: when it is too short to be one.

    """
    found = os.environ.get(SECRET, "").strip()
    if found and len(found) < SHORTEST:
        raise ValueError(f"{SECRET}: got {len(found)} characters, allowed: at least {SHORTEST}, the same on every rank")
    return found.encode() or None


def may_be_unauthenticated() -> bool:
    """Return whether the environment says that ranks may meet without a secret."""
    return os.environ.get(UNAUTHENTICATED) == "1"


def is_here(host: str) -> bool:
    """Return whether an address is one of this host."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return True
    except (OSError, UnicodeError):
        pass
    return False


def leave_secret(run: str) -> bytes:
    """Make a secret and leave it where this user's processes on this host find it; return it.

    Raises:
        OSError: when it cannot be left there.

    """
    secret = secrets.token_hex(_LEFT_BYTES).encode()
    descriptor, path = tempfile.mkstemp(prefix="trainsentry-")  # new, and readable by this user alone
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secret)
        Path(path).replace(_path_of(run))  # whole from the first moment
    except OSError:
        Path(path).unlink()
        raise
    return secret


def left_secret(run: str) -> bytes | None:
    """Return the secret that this run's rank 0 has left; None when it has not yet.

    Raises:
        PermissionError: when the file is another user's, or others may read it, or it is no file.

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
        of = os.fstat(descriptor)
        owner = os.geteuid() if hasattr(os, "geteuid") else of.st_uid
        if not stat.S_ISREG(of.st_mode) or of.st_uid != owner or stat.S_IMODE(of.st_mode) & 0o077 or of.st_nlink > 1:
            raise PermissionError(f"{path} cannot be trusted: it is not this user's alone")
        return os.read(descriptor, 2 * _LEFT_BYTES)
    finally:
        os.close(descriptor)


def take_secret_away(run: str) -> None:
    """Remove what `leave_secret` has left: all who were to read it have, or are not waited for any more."""
    with contextlib.suppress(OSError):
        _path_of(run).unlink()


def _path_of(run: str) -> Path:
    user = os.geteuid() if hasattr(os, "geteuid") else 0
    name = hashlib.blake2b(run.encode(), digest_size=8).hexdigest()
    return Path(tempfile.gettempdir()) / f"trainsentry-{user}-{name}.secret"
