"""Mutual authentication of two ends that share a secret, and seals on the messages they exchange afterwards.

The secret is never sent, nor can it be derived from what is sent. Four messages of fixed size:

    caller: its rank and a nonce
    callee: a nonce
    caller: its proof, the HMAC-SHA256 of the messages so far, the callee's purpose, and the role "caller"
    callee: its proof, the same with the role "door" (callee), sent only to a caller that has proven itself

Both nonces are in every proof, so no proof can be replayed; the roles differ, so none can be reflected; rank and
purpose are in it, so none is valid elsewhere. Each direction then has its own key, derived from the same data, and
each message carries an HMAC of its sequence number and content: no message can be inserted, changed, dropped in the
middle or replayed. HMAC is RFC 2104; the exchange is ISO/IEC 9798-4 with three passes, and one more in front.
"""

import hashlib
import hmac
import secrets
import struct
from typing import Final

_MAGIC: Final = b"TSr1"
"""First bytes of a caller of this protocol version."""

_NONCE: Final = 32
"""Bytes of a nonce; random ones of this size never repeat."""

_HELLO: Final = struct.Struct(f"!4sI{_NONCE}s")
_COUNT: Final = struct.Struct("!Q")

HELLO_BYTES: Final = _HELLO.size
CHALLENGE_BYTES: Final = _NONCE
PROOF_BYTES: Final = hashlib.sha256().digest_size

TAG_BYTES: Final = 16
"""Bytes of a message's seal: half of the digest, as RFC 2104 allows; guessing one takes 2^127 messages."""


class Refused(Exception):
    """The other side does not prove that it knows the secret, or a message is not the one it sent."""


class Seals:
    """Seals the messages that this side sends, and checks those it receives; each direction is numbered."""

    def __init__(self, own: bytes, others: bytes) -> None:
        self._own = hmac.new(own, digestmod=hashlib.sha256)
        self._others = hmac.new(others, digestmod=hashlib.sha256)
        self._sent = self._received = 0

    def seal(self, *parts: bytes) -> bytes:
        """Return the seal of this side's next message, given in parts."""
        self._sent += 1
        return _tag(self._own, self._sent, parts)

    def check(self, seal: bytes, *parts: bytes) -> None:
        """Check the seal of the other side's next message.

        Raises:
            Refused: when the seal does not belong to that message.

        """
        self._received += 1
        if not hmac.compare_digest(seal, _tag(self._others, self._received, parts)):
            raise Refused("a message is not the one that the other side sent")


class Caller:
    """The side that calls: `hello`, then `answer` the challenge, then `confirm` the callee's proof."""

    def __init__(self, secret: bytes, purpose: str, rank: int) -> None:
        self._secret = secret
        self._purpose = purpose
        self._hello = _HELLO.pack(_MAGIC, rank, secrets.token_bytes(_NONCE))
        self._challenge = b""

    def hello(self) -> bytes:
        """Return the first message."""
        return self._hello

    def answer(self, challenge: bytes) -> bytes:
        """Return the proof that this side knows the secret.

        Raises:
            Refused: when the challenge has another size.

        """
        if len(challenge) != CHALLENGE_BYTES:
            raise Refused("no challenge")
        self._challenge = challenge
        return self._derived(b"the caller proves")

    def confirm(self, proof: bytes) -> Seals:
        """Check the callee's proof; return the seals of this connection.

        Raises:
            Refused: when the callee does not know the secret.

        """
        if not self._challenge or not hmac.compare_digest(proof, self._derived(b"the door proves")):
            raise Refused("the other side does not know the secret")
        return Seals(self._derived(b"the caller says"), self._derived(b"the door says"))

    def _derived(self, part: bytes) -> bytes:
        return _derived(self._secret, part, self._purpose, self._hello + self._challenge)


class Callee:
    """The side that is called, for one caller: `challenge`, then `admit`. `rank` is the one the caller claims."""

    def __init__(self, secret: bytes, purpose: str) -> None:
        self.rank = -1
        self._secret = secret
        self._purpose = purpose
        self._transcript = b""

    def challenge(self, hello: bytes) -> bytes:
        """Return the challenge for a caller.

        Raises:
            Refused: when the caller does not speak this protocol.

        """
        if self._transcript or len(hello) != HELLO_BYTES or not hello.startswith(_MAGIC):
            raise Refused("not a caller of this protocol")
        self.rank = _HELLO.unpack(hello)[1]
        challenge = secrets.token_bytes(_NONCE)
        self._transcript = hello + challenge
        return challenge

    def admit(self, answer: bytes) -> tuple[bytes, Seals]:
        """Check the caller's proof; return this side's proof and the seals of this connection.

        Raises:
            Refused: when the caller does not know the secret.

        """
        if not self._transcript or not hmac.compare_digest(answer, self._derived(b"the caller proves")):
            raise Refused("the caller does not know the secret")
        seals = Seals(self._derived(b"the door says"), self._derived(b"the caller says"))
        return self._derived(b"the door proves"), seals

    def _derived(self, part: bytes) -> bytes:
        return _derived(self._secret, part, self._purpose, self._transcript)


def secret_for(secret: bytes, purpose: str, salt: str) -> str:
    """Return a secret for one purpose, derived from `secret` without revealing it; `salt` may be public."""
    return _derived(secret, b"secret for", purpose, salt.encode()).hex()


def _derived(secret: bytes, part: bytes, purpose: str, transcript: bytes) -> bytes:
    """Return the HMAC of all three under the secret; each is preceded by its length, so that no two can be confused."""
    text = b"".join(_COUNT.pack(len(piece)) + piece for piece in (part, purpose.encode(), transcript))
    return hmac.digest(secret, text, "sha256")


def _tag(keyed: "hmac.HMAC", count: int, parts: tuple[bytes, ...]) -> bytes:
    made = keyed.copy()
    made.update(_COUNT.pack(count))
    for part in parts:
        made.update(part)
    return made.digest()[:TAG_BYTES]
