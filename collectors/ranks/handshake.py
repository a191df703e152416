"""Challenge and answer between two ends that share a secret, and the seals on what they say to each other afterwards.

Neither the secret nor anything it could be told from travels. In order, each of a fixed size:

    caller: its rank and a number used once
    door:   a number used once
    caller: its proof, the HMAC-SHA256 of all that was said, of the door's purpose, and of its own part as the caller
    door:   its proof, of the same, in its part as the door: whoever has not proven anything is told nothing

Both sides' numbers are in every proof, so that none can be used again; the parts differ, so that none can be sent
back; the rank and the purpose are in them, so that none counts elsewhere. Each direction then has a key of its own,
made from the same, and each message carries the HMAC of its place in the order and of its content: nothing can be put
in, changed, left out in the middle, or sent again. HMAC is that of RFC 2104; the exchange is that of ISO/IEC 9798-4
with three passes, and one more in front.
"""

import hashlib
import hmac
import secrets
import struct
from typing import Final

_MAGIC: Final = b"TSr1"
"""What a caller of this version begins with."""

_NONCE: Final = 32
"""Bytes of a number used once: none ever comes twice."""

_HELLO: Final = struct.Struct(f"!4sI{_NONCE}s")
_COUNT: Final = struct.Struct("!Q")

HELLO_BYTES: Final = _HELLO.size
CHALLENGE_BYTES: Final = _NONCE
PROOF_BYTES: Final = hashlib.sha256().digest_size

TAG_BYTES: Final = 16
"""Bytes of a message's seal: half of the digest, as RFC 2104 allows; guessing one takes 2^127 messages."""


class Refused(Exception):
    """The other side does not prove that it knows the secret, or what came is not what it has said."""


class Seals:
    """Seals what this side says, and checks what the other says; both count along."""

    def __init__(self, own: bytes, others: bytes) -> None:
        self._own = hmac.new(own, digestmod=hashlib.sha256)
        self._others = hmac.new(others, digestmod=hashlib.sha256)
        self._said = self._heard = 0

    def seal(self, *parts: bytes) -> bytes:
        """Return the seal of this side's next message, given in parts."""
        self._said += 1
        return _tag(self._own, self._said, parts)

    def check(self, seal: bytes, *parts: bytes) -> None:
        """Check the seal of the other side's next message.

        Raises:
            Refused: when it is not that message's.

        """
        self._heard += 1
        if not hmac.compare_digest(seal, _tag(self._others, self._heard, parts)):
            raise Refused("a message is not what the other side has said")


class Caller:
    """The side that calls: `hello`, then `answer` to the challenge, then `confirm` with the door's proof."""

    def __init__(self, secret: bytes, purpose: str, rank: int) -> None:
        self._secret = secret
        self._purpose = purpose
        self._hello = _HELLO.pack(_MAGIC, rank, secrets.token_bytes(_NONCE))
        self._challenge = b""

    def hello(self) -> bytes:
        """Return what to say first."""
        return self._hello

    def answer(self, challenge: bytes) -> bytes:
        """Return the proof that this side knows the secret.

        Raises:
            Refused: when the challenge is none.

        """
        if len(challenge) != CHALLENGE_BYTES:
            raise Refused("no challenge")
        self._challenge = challenge
        return self._derived(b"the caller proves")

    def confirm(self, proof: bytes) -> Seals:
        """Check the door's proof; return the seals of this connection.

        Raises:
            Refused: when the door does not know the secret.

        """
        if not self._challenge or not hmac.compare_digest(proof, self._derived(b"the door proves")):
            raise Refused("the other side does not know the secret")
        return Seals(self._derived(b"the caller says"), self._derived(b"the door says"))

    def _derived(self, part: bytes) -> bytes:
        return _derived(self._secret, part, self._purpose, self._hello + self._challenge)


class Callee:
    """The side that is called, for one caller: `challenge`, then `admit`. `rank` is who the caller says it is."""

    def __init__(self, secret: bytes, purpose: str) -> None:
        self.rank = -1
        self._secret = secret
        self._purpose = purpose
        self._said = b""

    def challenge(self, hello: bytes) -> bytes:
        """Return the challenge for a caller.

        Raises:
            Refused: when it does not speak this protocol.

        """
        if self._said or len(hello) != HELLO_BYTES or not hello.startswith(_MAGIC):
            raise Refused("no caller of this kind")
        self.rank = _HELLO.unpack(hello)[1]
        challenge = secrets.token_bytes(_NONCE)
        self._said = hello + challenge
        return challenge

    def admit(self, answer: bytes) -> tuple[bytes, Seals]:
        """Check the caller's proof; return this side's and the seals of this connection.

        Raises:
            Refused: when the caller does not know the secret.

        """
        if not self._said or not hmac.compare_digest(answer, self._derived(b"the caller proves")):
            raise Refused("the caller does not know the secret")
        seals = Seals(self._derived(b"the door says"), self._derived(b"the caller says"))
        return self._derived(b"the door proves"), seals

    def _derived(self, part: bytes) -> bytes:
        return _derived(self._secret, part, self._purpose, self._said)


def secret_for(secret: bytes, purpose: str, salt: str) -> str:
    """Return a secret for one purpose, made from another that it does not tell; `salt` may be known to all."""
    return _derived(secret, b"secret for", purpose, salt.encode()).hex()


def _derived(secret: bytes, part: bytes, purpose: str, said: bytes) -> bytes:
    """Return the HMAC of all three under the secret; their lengths stand in front, so that they cannot run together."""
    text = b"".join(_COUNT.pack(len(piece)) + piece for piece in (part, purpose.encode(), said))
    return hmac.digest(secret, text, "sha256")


def _tag(keyed: "hmac.HMAC", count: int, parts: tuple[bytes, ...]) -> bytes:
    made = keyed.copy()
    made.update(_COUNT.pack(count))
    for part in parts:
        made.update(part)
    return made.digest()[:TAG_BYTES]
