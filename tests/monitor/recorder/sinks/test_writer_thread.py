"""A writer thread keeps a bounded number of unwritten records, and names the steps that it left out."""

import threading

import pytest

from trainsentry.monitor.recorder.sinks.gaps import MAX_GAPS, Gaps
from trainsentry.monitor.recorder.sinks.writers import JOB_BYTES, MAX_FAULTS, MAX_REPORTED, OFF_SECONDS, WriterThread

GUARD_SECONDS = 30


class Place:
    """Takes numbers; refuses them with `error` while there is one; waits for `gate` before each."""

    def __init__(self):
        self.taken = []
        self.error = None
        self.gate = threading.Event()
        self.gate.set()
        self.asked = threading.Semaphore(0)

    def take(self, number):
        self.asked.release()
        assert self.gate.wait(GUARD_SECONDS)
        if self.error is not None:
            raise self.error
        self.taken.append(number)

    def wait_until_asked(self, times=1):
        for _ in range(times):
            assert self.asked.acquire(timeout=GUARD_SECONDS)


@pytest.fixture
def position():
    return Place()


def sink_of(gaps, **options):
    return WriterThread("place", gaps, GUARD_SECONDS, **options)


def submit(sink, position, numbers):
    for number in numbers:
        sink.submit(lambda n=number: position.take(n), number)
        sink.settle()


def wait_until_idle(sink, position):
    while sink.is_busy:
        position.wait_until_asked()


def listed(gaps):
    return [(gap["first_step"], gap["last_step"], gap["reason"]) for gap in gaps.to_json()]


def test_what_is_refused_is_tried_again_in_order(position):
    gaps = Gaps()
    sink = sink_of(gaps)
    submit(sink, position, range(3))
    position.error = OSError("full")
    submit(sink, position, range(3, 9))
    position.wait_until_asked(5)  # so it was tried a second time
    position.error = None
    sink.close()
    assert position.taken == list(range(9))
    assert listed(gaps) == []
    assert [event.kind for event in sink.take_events()] == ["trouble", "goes_on"]


def test_what_finds_no_room_while_it_is_refused_is_a_gap_with_a_beginning_and_an_end(position):
    gaps = Gaps()
    sink = sink_of(gaps, kept_bytes=4 * JOB_BYTES)
    position.error = OSError("full")
    submit(sink, position, range(10))
    assert listed(gaps) == [(4, 9, "OSError: full")]
    position.error = None
    wait_until_idle(sink, position)
    submit(sink, position, range(10, 13))
    sink.close()
    assert position.taken == [*range(4), *range(10, 13)]
    assert listed(gaps) == [(4, 9, "OSError: full")]


def test_a_second_trouble_is_a_second_gap(position):
    gaps = Gaps()
    sink = sink_of(gaps, kept_bytes=JOB_BYTES)
    for begin in (0, 10):
        position.error = OSError("full")
        submit(sink, position, range(begin, begin + 3))
        position.error = None
        wait_until_idle(sink, position)
        submit(sink, position, [begin + 5])
    sink.close()
    assert [(first, last) for first, last, _ in listed(gaps)] == [(1, 2), (11, 12)]


def test_a_late_write_is_waited_for_once_and_what_follows_is_kept(position):
    gaps = Gaps()
    sink = WriterThread("place", gaps, 0.05)
    position.gate.clear()
    submit(sink, position, range(5))
    assert sink.state.startswith("a write has not returned after 0.05 s")
    position.gate.set()
    sink.close()
    assert position.taken == list(range(5))
    assert listed(gaps) == []


def test_a_clock_that_says_so_makes_a_write_late(position):
    now = [0.0]
    sink = WriterThread("place", Gaps(), 5.0, clock=lambda: now[0])
    position.gate.clear()
    sink.submit(lambda: position.take(0), 0)
    position.wait_until_asked()
    now[0] = 6.0
    sink.settle()
    assert [event.kind for event in sink.take_events()] == ["trouble"]
    position.gate.set()
    sink.close()


def test_a_fault_of_the_writer_costs_one_record_and_the_third_in_a_row_the_sink(position):
    gaps = Gaps()
    sink = sink_of(gaps)
    position.error = ValueError("not a number")
    submit(sink, position, [0])
    position.error = None
    submit(sink, position, range(1, 4))
    wait_until_idle(sink, position)
    position.error = ValueError("not a number")
    submit(sink, position, range(4, 4 + MAX_FAULTS))
    wait_until_idle(sink, position)
    position.error = None
    submit(sink, position, range(10, 12))
    sink.close()
    assert position.taken == [1, 2, 3]
    assert [(first, last) for first, last, _ in listed(gaps)] == [(0, 0), (4, 11)]
    assert [event.kind for event in sink.take_events()][-1] == "off"
    assert sink.off == "ValueError: not a number"


def test_a_sink_that_is_off_comes_back_by_itself_and_names_what_it_lacks(position):
    now = [0.0]
    gaps = Gaps()
    sink = sink_of(gaps, clock=lambda: now[0])
    position.error = ValueError("not a number")
    submit(sink, position, range(MAX_FAULTS))
    wait_until_idle(sink, position)
    now[0] = OFF_SECONDS
    submit(sink, position, [10])  # it still fails, and is off for twice as long
    wait_until_idle(sink, position)
    position.error = None
    now[0] = 2.5 * OFF_SECONDS
    submit(sink, position, [20])
    now[0] = 3.5 * OFF_SECONDS
    submit(sink, position, [30, 31])
    sink.close()
    assert position.taken == [30, 31]
    assert [(first, last) for first, last, _ in listed(gaps)] == [(0, 20)]
    assert [event.kind for event in sink.take_events()] == ["trouble", "off", "off", "goes_on"]


def test_trouble_that_comes_again_and_again_is_not_told_every_time(position):
    sink = sink_of(Gaps())
    for number in range(2 * MAX_REPORTED):
        position.error = OSError("full")
        submit(sink, position, [number])
        position.error = None
        wait_until_idle(sink, position)
    sink.close()
    assert sum(event.kind == "trouble" for event in sink.take_events()) == MAX_REPORTED
    assert len(position.taken) == 2 * MAX_REPORTED


def test_what_is_left_when_it_ends_is_a_gap(position):
    gaps = Gaps()
    sink = sink_of(gaps)
    position.error = OSError("full")
    submit(sink, position, range(3))
    sink.close()
    assert listed(gaps) == [(0, 2, "OSError: full")]
    assert sink.off == "OSError: full"


def test_where_no_thread_can_be_started_writes_are_done_at_once(position, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    gaps = Gaps()
    sink = sink_of(gaps)
    submit(sink, position, range(3))
    position.error = OSError("full")
    submit(sink, position, [3])
    sink.close()
    assert position.taken == [0, 1, 2]
    assert listed(gaps) == [(3, 3, "OSError: full")]


def test_the_list_of_gaps_is_bounded_and_leaves_nothing_out():
    gaps = Gaps()
    for step in range(3 * MAX_GAPS):
        gaps.add("csv", step, step, "full")
    found = gaps.to_json()
    assert len(found) == MAX_GAPS
    assert max(gap["last_step"] for gap in found) == 3 * MAX_GAPS - 1
