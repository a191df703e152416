"""A recorder goes on recording whatever strangers do at its port."""

import contextlib
import resource
import socket
import struct
import time
from pathlib import Path

import pytest
from recording_process import Recording
from rendezvous_endpoint import hung_up

MOST_MEMORY = 48 * 2**20
"""Bytes by which a recorder may grow: what it reads at once from connections, some tables, and some room."""


@pytest.fixture
def recording(tmp_path):
    made = Recording(tmp_path)
    made.record()  # it has started
    yield made
    made.close()


def test_nested_json_of_strangers_does_not_end_the_recording(recording):
    nested = b'{"token": ' + b"[" * 5000
    for _ in range(8):
        with socket.create_connection(recording.endpoint) as stranger:
            stranger.sendall(struct.pack("=II", 1, len(nested)) + nested)
            assert hung_up(stranger)
        recording.record()
    recording.check()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the recorder's memory from /proc")
@pytest.mark.parametrize("size", [2**26, 2**32 - 1])
def test_a_first_message_without_end_takes_no_memory(recording, size):
    before, chunk = recording.memory(), bytes(2**22)
    with socket.create_connection(recording.endpoint) as stranger, contextlib.suppress(OSError):
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
            silent[-1].connect_ex(recording.endpoint)
        recording.record()
    held = len(list(Path(f"/proc/{recording.pid}/fd").iterdir()))
    assert held < 64 + 32, "sixty-four strangers, and what a recorder holds by itself"
    for sock in silent:
        sock.close()
    recording.check()


def test_all_of_it_at_once_leaves_the_recording_whole(recording):
    """Many strangers at a time, with many kinds of garbage, while steps are recorded."""
    garbage = [b"", b"\0" * 64, b"GET / HTTP/1.1\r\n\r\n", b"{" * 4096, struct.pack("=II", 2, 8), b"TSr1" + bytes(36)]
    end = time.monotonic() + 60
    for turn in range(20):
        strangers = [socket.create_connection(recording.endpoint, 30) for _ in range(len(garbage))]
        for sock, said in zip(strangers, garbage, strict=True):
            with contextlib.suppress(OSError):
                sock.sendall(said)
        recording.record()
        for sock in strangers:
            sock.close()
        assert time.monotonic() < end, turn
    recording.check()
