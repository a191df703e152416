"""Two ends that share a secret prove it to each other; a caller without it is refused and can send nothing."""

import pytest

from trainsentry.collectors.ranks import handshake
from trainsentry.collectors.ranks.handshake import Callee, Caller, Refused, Seals, secret_for

SECRET = b"s" * 32


def shaken(secret=SECRET, purpose="meeting", rank=3):
    """Return the seals of a caller and a callee that have proven themselves to each other, and the bytes they sent."""
    caller, callee = Caller(secret, purpose, rank), Callee(secret, purpose)
    sent = [caller.hello()]
    sent.append(callee.challenge(sent[-1]))
    sent.append(caller.answer(sent[-1]))
    proof, seals = callee.admit(sent[-1])
    sent.append(proof)
    assert callee.rank == rank
    return caller.confirm(proof), seals, sent


def test_both_ends_hear_what_the_other_says_in_order():
    caller, callee, sent = shaken()
    hello, challenge, proof = handshake.HELLO_BYTES, handshake.CHALLENGE_BYTES, handshake.PROOF_BYTES
    assert [len(part) for part in sent] == [hello, challenge, proof, proof]
    for said in (b"one", b"two", b""):
        callee.check(caller.seal(said), said)
        caller.check(callee.seal(said), said)


def test_nothing_that_is_sent_holds_the_secret_or_comes_twice():
    one, other = (shaken()[2] for _ in range(2))
    assert not set(one) & set(other)
    assert all(SECRET not in part for part in one)


@pytest.mark.parametrize("wrong", [(b"t" * 32, "meeting"), (SECRET, "recorders"), (b"", "meeting")])
def test_another_secret_or_another_purpose_passes_neither_way(wrong):
    caller, callee = Caller(*wrong, 3), Callee(SECRET, "meeting")
    with pytest.raises(Refused):
        callee.admit(caller.answer(callee.challenge(caller.hello())))
    caller, callee = Caller(SECRET, "meeting", 3), Callee(*wrong)
    caller.answer(callee.challenge(caller.hello()))
    with pytest.raises(Refused):
        caller.confirm(b"\0" * handshake.PROOF_BYTES)


def test_a_proof_does_not_pass_for_another_rank():
    caller, callee = Caller(SECRET, "meeting", 3), Callee(SECRET, "meeting")
    as_another = caller.hello().replace(b"\0\0\0\3", b"\0\0\0\4", 1)
    with pytest.raises(Refused):
        callee.admit(caller.answer(callee.challenge(as_another)))


def test_a_proof_cannot_be_sent_again_nor_sent_back():
    _, _, sent = shaken()
    callee = Callee(SECRET, "meeting")
    callee.challenge(sent[0])
    with pytest.raises(Refused):
        callee.admit(sent[2])
    caller = Caller(SECRET, "meeting", 3)
    answer = caller.answer(b"c" * handshake.CHALLENGE_BYTES)
    for proof in (answer, sent[3]):
        with pytest.raises(Refused):
            caller.confirm(proof)


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n", b"\0" * handshake.HELLO_BYTES])
def test_what_is_no_call_is_refused(said):
    with pytest.raises(Refused):
        Callee(SECRET, "meeting").challenge(said)


def test_an_endpoint_without_a_caller_and_a_caller_without_a_challenge_pass_nobody():
    with pytest.raises(Refused):
        Callee(SECRET, "meeting").admit(b"\0" * handshake.PROOF_BYTES)
    with pytest.raises(Refused):
        Caller(SECRET, "meeting", 0).confirm(b"\0" * handshake.PROOF_BYTES)
    with pytest.raises(Refused):
        Caller(SECRET, "meeting", 0).answer(b"short")


@pytest.mark.parametrize(("before", "heard"), [(0, b"two"), (1, b"one"), (1, b"three"), (0, b"One")])
def test_a_message_that_was_changed_left_out_or_sent_again_is_noticed(before, heard):
    one, other = Seals(b"up", b"down"), Seals(b"down", b"up")
    sealed = {said: one.seal(said) for said in (b"one", b"two", b"three")}
    for said in list(sealed)[:before]:
        other.check(sealed[said], said)
    with pytest.raises(Refused):
        other.check(sealed[heard.lower()], heard)


def test_what_one_side_says_cannot_be_sent_back_to_it():
    caller, _, _ = shaken()
    with pytest.raises(Refused):
        caller.check(caller.seal(b"stop"), b"stop")


def test_secrets_for_other_purposes_differ():
    made = {secret_for(SECRET, purpose, salt) for purpose in "ab" for salt in "cd"}
    assert len(made) == 4
    assert secret_for(SECRET, "ab", "c") != secret_for(SECRET, "a", "bc")
