"""The ring carries messages in order, refuses those that do not fit, and keeps those that were not committed."""

import random

import pytest

from trainsentry.monitor.recorder.ring import Ring


@pytest.fixture
def ring():
    made = Ring.create(4096)
    yield made
    made.close()


def test_messages_of_many_sizes_arrive_in_order_around_the_end(ring):
    rng = random.Random(0)
    sent, got = [], []
    for _ in range(2000):
        data = rng.randbytes(rng.randrange(900))
        while not ring.write(len(sent) % 7, [data[:10], data[10:]]):
            got.append(ring.read(ring.head))
            ring.commit()
        sent.append((len(sent) % 7, data))
    while (message := ring.read(ring.head)) is not None:
        got.append(message)
    assert got == sent


def test_a_full_ring_refuses_and_a_commit_makes_room(ring):
    count = 0
    while ring.write(1, [bytes(500)]):
        count += 1
    assert count == 8
    ring.read(ring.head)
    assert not ring.write(1, [bytes(500)])
    ring.commit()
    assert ring.write(1, [bytes(500)])


def test_what_was_read_but_not_committed_is_there_for_a_successor(ring):
    ring.write(1, [b"a"])
    ring.write(1, [b"b"])
    assert ring.read(ring.head) == (1, b"a")
    ring.commit()
    assert ring.read(ring.head) == (1, b"b")
    import os

    successor = Ring(os.dup(ring.descriptor), ring.size)
    assert successor.read(successor.head) == (1, b"b")
    successor.close()


def test_nothing_is_read_beyond_what_was_announced(ring):
    ring.write(1, [b"a"])
    announced = ring.head
    ring.write(1, [b"b"])
    assert ring.read(announced) == (1, b"a")
    assert ring.read(announced) is None


def test_a_message_too_large_for_the_ring_is_refused_by_name(ring):
    with pytest.raises(ValueError, match="1024"):
        ring.write(1, [bytes(2000)])
