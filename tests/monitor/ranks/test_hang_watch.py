"""Ranks find the cause of a hang from notes that they leave with one of them over sockets."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from trainsentry.collectors.ranks.rendezvous import Endpoint, meet
from trainsentry.monitor.ranks import hang_watch
from trainsentry.monitor.ranks.hang_watch import HangWatch


@pytest.mark.parametrize("gone", [False, True])
def test_a_hang_is_told_of_also_where_the_rank_that_holds_the_store_is_gone(tmp_path, gone, monkeypatch):
    monkeypatch.setattr(hang_watch, "REPORT_SECONDS", 2.0)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = Endpoint.at("127.0.0.1", str(free.getsockname()[1]))

    have_met = threading.Barrier(2)

    def work(rank):
        rendezvous = meet(endpoint, rank, 2, 20)
        have_met.wait(20)
        if rank == 0 and gone:
            for sock in [*rendezvous._server._ranks]:
                sock.shutdown(socket.SHUT_RDWR)
            return None
        report = {"step": 3, "waits_for": None, "call": None, "open": []}
        watch = HangWatch(0.2, lambda: report, rendezvous.store, tmp_path / f"rank{rank}", rank=rank, abort=False)
        for _ in range(3):
            watch.step_ended()
        deadline = time.monotonic() + 30
        while watch.message is None and time.monotonic() < deadline:
            time.sleep(0.05)
        watch.close()
        return watch.message

    with ThreadPoolExecutor(2) as pool:
        told = list(pool.map(work, range(2)))
    assert "rank 1 has been in step 3" in told[1]
    assert ("Rank 0 sent no report" in told[1]) == gone
    assert (tmp_path / "rank1" / "hang.json").exists()


@pytest.mark.parametrize(
    "word",
    ["", "nothing", "[]", "7", "[" * 60_000, "{}", '{"step": "3"}', '{"step": 3, "in_framework": 1, "where": "x"}',
     '{"step": 3, "in_framework": false, "where": "x", "waits_for": ["y"]}'],
)  # fmt: skip
def test_a_word_of_another_rank_that_is_no_report_ends_no_watch(tmp_path, word, monkeypatch):
    class Board:
        size = 2

        def put(self, key, text):
            pass

        def all(self, prefix):
            return {1: word}

    monkeypatch.setattr(hang_watch, "REPORT_SECONDS", 0.0)
    report = {"step": 3, "waits_for": None, "call": None, "open": []}
    watch = HangWatch(0.1, lambda: report, Board(), tmp_path, rank=0, abort=False)
    for _ in range(3):
        watch.step_ended()
    deadline = time.monotonic() + 60
    while watch.message is None and time.monotonic() < deadline:
        time.sleep(0.02)
    watch.close()
    assert "Rank 1 sent no report" in watch.message
