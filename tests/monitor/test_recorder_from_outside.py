"""A recorder in a process of its own, and strangers at its port: it goes on recording whatever they do."""

import contextlib
import resource
import socket
import struct
import time
from pathlib import Path

import numpy as np
import pytest
from recorder_tree import GRADIENT, WHOLE, weights

from trainsentry.anomaly.anomaly import Anomaly
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import SeriesTable
from trainsentry.collectors.statistics import COLUMNS
from trainsentry.monitor.recorder import messages
from trainsentry.monitor.recorder.framing import JSON
from trainsentry.monitor.recorder.heard import MOST_NONSENSE
from trainsentry.monitor.recorder.hello import Hello
from trainsentry.monitor.recorder.link import RecorderLink
from trainsentry.monitor.recorder.network import Network
from trainsentry.monitor.recorder.place import Address, Place

RANKS = (0, 1, 2)

MOST_MEMORY = 48 * 2**20
"""Bytes by which a recorder may grow: what it reads at once from connections, some tables, and some room."""


class Recording:
    """Rank 0 with its recorder, which waits for those of ranks 1 and 2."""

    def __init__(self, out):
        self.out = out
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.door = self.listening.getsockname()
        place = Place(0, RANKS, RANKS[1:], None, "word", self.listening.fileno())
        self.table = SeriesTable()
        hello = Hello(str(out), 0, ("min", "max", "norm"), 1000, None, None, 1.0, 0, 2**30, 2**20, place=place)
        self.link = RecorderLink(hello, self.table)
        self.heard = []
        self.steps = 0

    @property
    def pid(self):
        return self.link.running.process.pid

    def record(self, steps=1):
        """Record steps, and wait until they are judged."""
        for _ in range(steps):
            self.link.send_record(record(self.table, self.steps, 0))
            self.steps += 1
        heard, answer = self.link.ask(messages.FLUSH, messages.FLUSHED, 60)
        self.heard += heard
        assert answer is not None, "the recorder does not answer"

    def memory(self):
        """Bytes that the recorder has held at most."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024

    def close(self):
        """End the recorder, once."""
        if self.listening.fileno() >= 0:
            self.listening.close()
            self.heard += self.link.close(60)

    def check(self):
        """Look that the first recorder has written every step."""
        self.close()
        lines = (self.out / "rank0" / "gradient_0-999.csv").read_text().splitlines()
        assert self.link.lost_recorders == []
        assert self.link.dead in (None, "closed")
        assert [line.split(",")[2] for line in lines[1:]] == [str(step) for step in range(self.steps)]


def record(table, step, rank):
    """A record of one gradient, equal on all ranks."""
    rows = weights(1.0 + step)
    ids, layouts = np.array([table.series_id(GRADIENT)], np.int32), np.array([table.layout_id(WHOLE)], np.int32)
    return StepRecord(step, rank, ids, layouts, np.array([values for *_, values in rows]).reshape(1, COLUMNS))


@pytest.fixture
def recording(tmp_path):
    made = Recording(tmp_path)
    made.record()  # it has started
    yield made
    made.close()


def hung_up(sock):
    sock.settimeout(30)
    with contextlib.suppress(ConnectionError):
        while sock.recv(1 << 16):
            pass
    return True


def test_nested_json_of_strangers_does_not_end_the_recording(recording):
    nested = b'{"token": ' + b"[" * 5000
    for _ in range(8):
        with socket.create_connection(recording.door) as stranger:
            stranger.sendall(struct.pack("=II", 1, len(nested)) + nested)
            assert hung_up(stranger)
        recording.record()
    recording.check()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the recorder's memory from /proc")
@pytest.mark.parametrize("size", [2**26, 2**32 - 1])
def test_a_first_message_without_end_takes_no_memory(recording, size):
    before, chunk = recording.memory(), bytes(2**22)
    with socket.create_connection(recording.door) as stranger, contextlib.suppress(OSError):
        stranger.settimeout(30)
        stranger.sendall(struct.pack("=II", 1, size))
        for _ in range(64):
            stranger.sendall(chunk)
    recording.record()
    assert recording.memory() - before < MOST_MEMORY
    recording.check()


def test_silent_connections_take_no_descriptors_away_from_the_recording(tmp_path):
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, usual[1]))  # the recorder's: it inherits them
    try:
        recording = Recording(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
    recording.record()
    silent = []
    for _ in range(5):
        for _ in range(60):
            silent.append(socket.socket())
            silent[-1].setblocking(False)
            silent[-1].connect_ex(recording.door)
        recording.record()
    held = len(list(Path(f"/proc/{recording.pid}/fd").iterdir()))
    assert held < 64 + 32, "sixty-four strangers, and what a recorder holds by itself"
    for sock in silent:
        sock.close()
    recording.check()


@pytest.mark.parametrize("said", [b"[" * 100_000, b"[]", b'{"type": "found", "rank": 1, "step": NaN}', b"\xff"])
def test_a_rank_that_knows_the_secret_and_sends_nonsense_costs_nobody_else_anything(recording, said):
    """Rank 2 is another recorder of the run; what it says after rank 1's nonsense is heard as before."""
    address = Address(0, "here", *recording.door, "word")
    bad, good = (Network(Place(rank, RANKS, (), address, "own")) for rank in RANKS[1:])
    end = time.monotonic() + 60
    while bad.parent is None or good.parent is None:
        assert not [*bad.pump(), *good.pump()]
        assert time.monotonic() < end
    lost = bad.parent
    while not lost.closed:
        assert not list(bad.pump())
        bad.send_up(JSON, said)
        assert time.monotonic() < end
    anomaly = Anomaly(0, 0, 2, 0, "w", "gradient", "nans", 1.0, 0.0, 9.0, "nonfinite", "nonfinite").to_json()
    good.tell_parent(
        {"type": "found", "rank": 2, "step": 0, "anomalies": [anomaly], "activations": False, "examined": False}
    )
    while not any(message["type"] == messages.INCIDENT for message in recording.heard):
        recording.record()
        assert time.monotonic() < end
    assert sum(message["type"] == messages.FAILURE for message in recording.heard) <= MOST_NONSENSE + 1
    bad.close()
    good.close()
    recording.check()


def test_all_of_it_at_once_leaves_the_recording_whole(recording):
    """Many strangers at a time, with many kinds of garbage, while steps are recorded."""
    garbage = [b"", b"\0" * 64, b"GET / HTTP/1.1\r\n\r\n", b"{" * 4096, struct.pack("=II", 2, 8), b"TSr1" + bytes(36)]
    end = time.monotonic() + 60
    for turn in range(20):
        strangers = [socket.create_connection(recording.door, 30) for _ in range(len(garbage))]
        for sock, said in zip(strangers, garbage, strict=True):
            with contextlib.suppress(OSError):
                sock.sendall(said)
        recording.record()
        for sock in strangers:
            sock.close()
        assert time.monotonic() < end, turn
    recording.check()
