"""Sockets between recorders: whole messages, nothing lost that had arrived, nobody let in without the word."""

import json
import socket
import struct
import time

import pytest

from trainsentry.monitor.recorder import network
from trainsentry.monitor.recorder.network import JSON, RECORD, Network
from trainsentry.monitor.recorder.place import Address, Place


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
    parent = Network(Place(0, (0, 1), (1,), None, "word", sock.detach()))
    child = Network(Place(1, (0, 1), (), Address(0, "here", "127.0.0.1", port, "word"), "other word"))
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


@pytest.mark.parametrize(
    "said",
    [
        b'{"type": "word", "rank": 1, "token": "wrong"}',
        b'{"type": "word", "rank": 5, "token": "word"}',
        b"[]",
        b"\xff",
        b'{"token": null}',
    ],
)
def test_nobody_is_let_in_without_the_word(said):
    sock, port = listening()
    parent = Network(Place(0, (0, 1), (1,), None, "word", sock.detach()))
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(struct.pack("=II", JSON, len(said)) + said)
        stranger.setblocking(False)

        def turned_away():
            assert not list(parent.pump())
            try:
                return stranger.recv(1) == b""
            except BlockingIOError:
                return False

        until(turned_away)
    assert not parent.children
    parent.close()


def test_a_successor_takes_the_place_of_the_one_before(pair):
    parent, child = pair
    first = parent.children[1]
    again = Network(child.place)
    until(lambda: [*again.pump(), *parent.pump()] == [] and parent.children[1] is not first)
    again.tell_parent({"type": "again"})
    assert [data for _, _, data in heard(parent)] == [b'{"type": "again"}']
    again.close()


def test_a_parent_that_is_not_there_yet_is_called_again_and_given_up_in_the_end():
    sock, port = listening()
    sock.close()
    clock = Clock()
    child = Network(Place(1, (0, 1), (), Address(0, "here", "127.0.0.1", port, "word"), "w"), clock)
    for clock.now in (0.0, 10.0, network.PATIENCE_SECONDS - 1):
        until(lambda: not list(child.pump()) and child._calling is None)
        assert not child.lost_parent
    late = socket.create_server(("127.0.0.1", port))
    clock.now += 0.6
    until(lambda: not list(child.pump()) and child.parent is not None)
    assert not child.lost_parent
    late.accept()[0].close()
    late.close()
    until(lambda: not list(child.pump()) and child.parent is None)
    clock.now += network.AGAIN_SECONDS + 1  # one that was there before is waited for less long
    until(lambda: not list(child.pump()) and child.lost_parent)
    child.close()


def test_a_parent_that_does_not_read_costs_no_more_memory_than_is_allowed(pair, monkeypatch):
    _, child = pair
    monkeypatch.setattr(network, "MOST_UNSENT", 2**22)
    for _ in range(200):
        child.send_up(RECORD, b"x" * 2**20)
        assert child.unsent <= 2**22
    list(child.pump())
    assert child.parent is None


def test_a_message_of_absurd_length_ends_the_link(pair):
    parent, child = pair
    child.parent.outbox += struct.pack("=II", RECORD, 2**31) + b"x"
    child.parent.send()
    until(lambda: not list(parent.pump()) and not parent.children)
