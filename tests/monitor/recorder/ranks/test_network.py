"""Recorders exchange whole messages over sockets, lose none that arrived, and admit no one without the secret."""

import contextlib
import errno
import json
import socket
import struct
import threading
import time

import pytest

from trainsentry.collectors.ranks import handshake, unproven_callers
from trainsentry.collectors.ranks.handshake import Caller
from trainsentry.monitor.recorder.ranks import framing, network
from trainsentry.monitor.recorder.ranks.framing import JSON, RECORD
from trainsentry.monitor.recorder.ranks.network import Network, new_selector
from trainsentry.monitor.recorder.ranks.tree_position import Address, TreePosition, purpose_of


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def listening():
    sock = socket.create_server(("127.0.0.1", 0))
    return sock, sock.getsockname()[1]


@pytest.fixture
def pair():
    """Two recorders that know each other: the parent's network and the child's."""
    sock, port = listening()
    parent = Network(TreePosition(0, (0, 1), (1,), None, "word", sock.detach()))
    child = Network(TreePosition(1, (0, 1), (), Address(0, "here", "127.0.0.1", port, "word"), "other word"))
    until(lambda: [*child.pump(), *parent.pump()] == [] and parent.children and child.parent is not None)
    yield parent, child
    parent.close()
    child.close()


def until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def heard(by, others=()):
    """Pump until something arrives; return it."""
    found = []

    def listen():
        for other in others:
            list(other.pump())
        found.extend(by.pump())
        return bool(found)

    until(listen)
    return found


def reset(sock):
    """End a connection with a reset, as the death of a host does."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def test_messages_arrive_whole_and_in_order_both_ways(pair):
    parent, child = pair
    large = bytes(range(256)) * 40_000  # more than a socket takes at once
    child.send_up(RECORD, large)
    child.tell_parent({"type": "small"})
    found = []
    until(lambda: found.extend([*heard(parent, [child])]) or len(found) == 2)
    assert found == [(1, RECORD, large), (1, JSON, b'{"type": "small"}')]
    parent.tell_children({"type": "a"})
    parent.tell_child(1, {"type": "b"})
    parent.tell_child(7, {"type": "nobody"})
    found = []
    until(lambda: found.extend(heard(child)) or len(found) == 2)
    assert [(rank, json.loads(data)["type"]) for rank, _, data in found] == [(0, "a"), (0, "b")]


def test_what_a_child_said_before_it_went_is_heard_though_it_takes_nothing_any_more(pair):
    parent, child = pair
    child.tell_parent({"type": "last words"})
    sock = child.parent.sock
    child.parent = None
    reset(sock)
    parent.tell_children({"type": "are you there"})
    parent.tell_children({"type": "are you there"})
    assert [data for _, _, data in heard(parent)] == [b'{"type": "last words"}']
    until(lambda: not list(parent.pump()) and not parent.children)
    assert parent.unsent == 0


def caller_of(network, secret="word", rank=1, purpose=None):
    """Call a recorder and prove oneself as far as the secret allows; return the socket, and the seals if let in."""
    caller = Caller(secret.encode(), purpose or purpose_of(0), rank)
    sock = socket.create_connection(network.endpoint)
    sock.settimeout(0.001)
    sock.sendall(caller.hello())
    sock.sendall(caller.answer(read(sock, network, handshake.CHALLENGE_BYTES)))
    proof = read(sock, network, handshake.PROOF_BYTES)
    return sock, caller.confirm(proof) if proof else None


def read(sock, network, size):
    """Read as many bytes while the recorder does its work, or none when it has hung up."""
    found = []

    def more():
        found.extend(network.pump())
        try:
            data = sock.recv(size, socket.MSG_PEEK)
        except TimeoutError:
            return False
        except ConnectionError:
            return True
        return len(data) in (0, size)

    until(more)
    assert found == []
    try:
        return sock.recv(size)
    except ConnectionError:
        return b""


@pytest.fixture
def parent():
    """A recorder that waits for rank 1; its clock does not go by itself."""
    sock, port = listening()
    made = Network(TreePosition(0, (0, 1), (1,), None, "word", sock.detach()), Clock())
    made.endpoint = ("127.0.0.1", port)
    yield made
    made.close()


@pytest.mark.parametrize(
    "stranger",
    [{"secret": "wrong"}, {"secret": ""}, {"rank": 5}, {"rank": 0}, {"purpose": purpose_of(1)}],
)
def test_nobody_is_let_in_who_does_not_know_the_secret_of_this_recorder_or_is_no_child(parent, stranger):
    sock, _ = caller_of(parent, **stranger)
    with sock:
        assert read(sock, parent, 1) == b""
    assert not parent.children
    known, seals = caller_of(parent)
    with known:
        assert seals is not None
        assert set(parent.children) == {1}


@pytest.mark.parametrize(
    "said",
    [
        struct.pack("=II", JSON, 46) + b'{"type": "word", "rank": 1, "token": "word"}  ',
        b"[]" * 100,
        b"\xff" * 100,
        b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n" * 3,
        struct.pack("=II", JSON, 5000) + b"[" * 5000,
        struct.pack("=II", RECORD, 2**31) + b"x" * 100,
        b"\0" * 100,
    ],
)
def test_a_stranger_who_says_anything_else_is_turned_away_unheard(parent, said):
    with socket.create_connection(parent.endpoint) as stranger:
        stranger.settimeout(0.001)
        stranger.sendall(said)
        assert read(stranger, parent, 1) == b""
    assert not parent.children


def test_of_a_stranger_no_more_is_read_than_a_first_word_has(parent):
    with socket.create_connection(parent.endpoint) as stranger:
        stranger.setblocking(False)
        sent = 0
        with contextlib.suppress(OSError):
            for _ in range(200):
                sent += stranger.send(b"T" * 2**16)
                list(parent.pump())
                assert sum(len(s.inbox) for s in parent._strangers._callers) <= handshake.HELLO_BYTES
        assert sent > 0
        until(lambda: not list(parent.pump()) and not len(parent._strangers))


def test_silent_strangers_are_few_and_leave_soon_and_keep_no_rank_out(parent):
    silent = []
    for _ in range(4):
        silent += [socket.create_connection(parent.endpoint) for _ in range(40)]
        until(
            lambda: (
                not list(parent.pump()) and len(parent._strangers) == min(len(silent), unproven_callers.MOST_UNPROVEN)
            )
        )
    known, seals = caller_of(parent)
    assert seals is not None
    parent._clock.now += unproven_callers.PROOF_SECONDS
    until(lambda: not list(parent.pump()) and not len(parent._strangers))
    assert set(parent.children) == {1}
    for sock in (*silent, known):
        sock.close()


def test_one_who_says_a_byte_now_and_then_is_given_no_more_time(parent):
    with socket.create_connection(parent.endpoint) as slow:
        for parent._clock.now in range(int(unproven_callers.PROOF_SECONDS)):
            slow.sendall(b"T")
            until(lambda: not list(parent.pump()) and len(parent._strangers) == 1)
        parent._clock.now += 1
        until(lambda: not list(parent.pump()) and not len(parent._strangers))


def test_what_was_said_to_one_recorder_is_of_no_use_with_it_later(parent):
    """An eavesdropper replays, byte for byte, the messages of a child."""
    caller, seals = Caller(b"word", purpose_of(0), 1), None
    with socket.create_connection(parent.endpoint) as sock:
        sock.settimeout(0.001)
        said = [caller.hello()]
        sock.sendall(said[0])
        said.append(caller.answer(read(sock, parent, handshake.CHALLENGE_BYTES)))
        sock.sendall(said[1])
        seals = caller.confirm(read(sock, parent, handshake.PROOF_BYTES))
        head = struct.pack("=II", JSON, 2)
        said.append(head + seals.seal(head, b"{}") + b"{}")
        sock.sendall(said[2])
        assert heard(parent) == [(1, JSON, b"{}")]
        sock.sendall(said[2])  # once more, on the same connection
        until(lambda: not list(parent.pump()) and not parent.children)
    with socket.create_connection(parent.endpoint) as again:
        again.settimeout(0.001)
        again.sendall(b"".join(said))
        until(lambda: not list(parent.pump()) and not len(parent._strangers))
    assert not parent.children


def test_a_recorder_without_a_descriptor_left_lets_nobody_in_for_a_while_and_then_goes_on(parent, monkeypatch):
    class NoneLeft:
        def accept(self):
            raise OSError(errno.EMFILE, "too many open files")

    kept = parent._strangers._listening
    parent._strangers._listening = NoneLeft()
    with socket.create_connection(parent.endpoint):
        list(parent.pump())
        parent._strangers._listening = kept
        with new_selector() as selector:
            parent.register(selector)
            assert selector.select(0) == []  # it does not spin
        list(parent.pump())
        assert len(parent._strangers) == 0
        parent._clock.now += unproven_callers.PAUSE_SECONDS
        until(lambda: not list(parent.pump()) and len(parent._strangers) == 1)


def test_a_child_says_nothing_to_a_parent_that_does_not_know_the_secret():
    """Another process has the port: it learns neither the secret nor any record."""
    sock, port = listening()
    clock = Clock()
    child = Network(TreePosition(1, (0, 1), (), Address(0, "here", "127.0.0.1", port, "word"), "w"), clock)
    sock.setblocking(False)
    calls = []

    def accepted():
        list(child.pump())
        with contextlib.suppress(BlockingIOError):
            calls.append(sock.accept()[0])
        return calls

    until(accepted)
    [call] = calls
    call.settimeout(0.001)
    hello = read(call, child, handshake.HELLO_BYTES)
    call.sendall(b"c" * handshake.CHALLENGE_BYTES)
    answer = read(call, child, handshake.PROOF_BYTES)
    call.sendall(answer)  # sent back
    assert read(call, child, 1) == b""
    assert b"word" not in hello + answer
    assert child.parent is None
    clock.now += network.PATIENCE_SECONDS
    call.close()
    sock.close()
    until(lambda: not list(child.pump()) and child.lost_parent)
    child.close()


def test_a_fast_sender_does_not_keep_a_recorder_from_the_others(parent, monkeypatch):
    sock, seals = caller_of(parent)
    head, data = struct.pack("=II", RECORD, 2**20), bytes(2**20)
    frame = head + seals.seal(head, data) + data
    more = b"".join(head + seals.seal(head, data) + data for _ in range(7))
    sender = threading.Thread(target=sock.sendall, args=(frame + more,))
    sock.settimeout(None)
    monkeypatch.setattr(framing, "READ_AT_ONCE", 2**18)
    sender.start()
    link, found = parent.children[1], []

    def pumped():
        found.extend(parent.pump())
        assert len(link.inbox) <= 2**20 + 2**19
        return len(found) == 8

    until(pumped)
    sender.join()
    sock.close()


def test_a_successor_takes_the_place_of_the_one_before(pair):
    parent, child = pair
    first = parent.children[1]
    again = Network(child.position)
    until(lambda: [*again.pump(), *parent.pump()] == [] and again.parent is not None)
    assert parent.children[1] is not first
    again.tell_parent({"type": "again"})
    assert [data for _, _, data in heard(parent)] == [b'{"type": "again"}']
    again.close()


def test_a_parent_that_is_not_there_yet_is_called_again_and_given_up_in_the_end():
    sock, port = listening()
    sock.close()
    clock = Clock()
    child = Network(TreePosition(1, (0, 1), (), Address(0, "here", "127.0.0.1", port, "word"), "w"), clock)
    for clock.now in (0.0, 2.0, network.AGAIN_SECONDS - 1):  # a door that is closed stays so, but for a short while
        until(lambda: not list(child.pump()) and child._call is None)
        assert not child.lost_parent
    late = socket.create_server(("127.0.0.1", port))
    parent = Network(TreePosition(0, (0, 1), (1,), None, "word", late.detach()), clock)
    clock.now += 0.6
    until(lambda: [*child.pump(), *parent.pump()] == [] and child.parent is not None)
    assert not child.lost_parent
    parent.close()
    until(lambda: not list(child.pump()) and child.parent is None)
    clock.now += network.AGAIN_SECONDS + 1  # one that was there before is waited for less long
    until(lambda: not list(child.pump()) and child.lost_parent)
    child.close()


def test_a_parent_that_does_not_read_costs_no_more_memory_than_is_allowed(pair, monkeypatch):
    _, child = pair
    monkeypatch.setattr(framing, "MAX_UNSENT_BYTES", 2**22)
    for _ in range(200):
        child.send_up(RECORD, b"x" * 2**20)
        assert child.unsent <= 2**22
    list(child.pump())
    assert child.parent is None


def test_a_message_of_absurd_length_ends_the_link(pair):
    parent, child = pair
    head = struct.pack("=II", RECORD, 2**31)
    child.parent.outbox += head + child.parent.seals.seal(head, b"x") + b"x"
    child.parent.send()
    until(lambda: not list(parent.pump()) and not parent.children)


def test_a_message_that_the_other_side_would_not_take_is_not_sent(pair):
    _, child = pair
    with pytest.raises(ValueError, match="at most"):
        child.send_up(JSON, bytes(framing.MAX_MESSAGE_BYTES[JSON] + 1))
    assert child.unsent == 0
