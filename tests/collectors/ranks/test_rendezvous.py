"""Ranks meet over sockets, all or none; no rank waits for one that has left, and strangers are turned away."""

import contextlib
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from rendezvous_endpoint import at_the_endpoint, enter, hung_up, on_ranks, say

from trainsentry.collectors.ranks import run_secret
from trainsentry.collectors.ranks.handshake import Refused
from trainsentry.collectors.ranks.rendezvous import Endpoint, SocketMaxReduce, meet


def test_all_hear_what_each_gives_and_the_greatest(endpoint):
    def work(rank):
        rendezvous = meet(endpoint, rank, 4, 20)
        max_reduce = SocketMaxReduce(rendezvous, 20)
        heard = [rendezvous.exchange({"rank": rank, "round": i}) for i in range(3)]
        agreed = []
        for i in range(5):
            max_reduce.propose([rank * i, -rank, float("-inf")])
            agreed.append(max_reduce.result())
        rendezvous.close()
        return heard, agreed, max_reduce.result()

    found = on_ranks(4, work)
    assert found[0] == found[1] == found[2] == found[3]
    heard, agreed, nothing = found[0]
    assert heard[2] == [{"rank": rank, "round": 2} for rank in range(4)]
    assert agreed[4] == [12, 0, float("-inf")]
    assert nothing is None


def test_a_proposal_is_answered_while_the_rank_goes_on(endpoint):
    order = []

    def work(rank):
        rendezvous = meet(endpoint, rank, 2, 20)
        max_reduce = SocketMaxReduce(rendezvous, 20)
        max_reduce.propose([rank])
        order.append("proposed")
        rendezvous.exchange(None)
        agreed = max_reduce.result()
        rendezvous.close()
        return agreed

    assert on_ranks(2, work) == [[1], [1]]
    assert order == ["proposed", "proposed"]


def test_who_has_not_come_is_named_to_those_who_have(endpoint):
    found = on_ranks(4, lambda rank: meet(endpoint, rank, 4, 1.0), absent=(2,))
    assert len(found) == 3
    assert all(str(error).startswith("rank 2 did not call watch() within 1 s") for error in found)


def test_without_rank_0_the_others_give_up(endpoint):
    [found] = on_ranks(2, lambda rank: meet(endpoint, rank, 2, 0.5), absent=(0,))
    assert "rank 0 was not found at 127.0.0.1" in str(found)


def test_nobody_waits_for_a_rank_that_has_left(endpoint):
    def work(rank):
        rendezvous = meet(endpoint, rank, 3, 20)
        max_reduce = SocketMaxReduce(rendezvous, 60)
        max_reduce.propose([rank])
        first = max_reduce.result()
        if rank == 1:
            rendezvous.close()
            return first
        began = time.monotonic()
        max_reduce.propose([rank])
        with pytest.raises(RuntimeError, match="rank 1 left"):
            max_reduce.result()
        rendezvous.store.put(f"report/{rank}", "still here")
        while len(words := rendezvous.store.all("report")) < 2 and time.monotonic() - began < 20:
            time.sleep(0.01)
        waited = time.monotonic() - began
        rendezvous.close(broken=True)
        return first, words, waited < 30

    found = on_ranks(3, work)
    assert found[1] == [2]
    assert found[0] == found[2] == ([2], {0: "still here", 2: "still here"}, True)


def test_the_end_of_the_rank_that_holds_the_rendezvous_is_noticed(endpoint):
    held, ended = threading.Event(), threading.Event()

    def work(rank):
        rendezvous = meet(endpoint, rank, 2, 20)
        if rank == 0:
            assert held.wait(20)
            for sock in [*rendezvous._server._ranks]:
                with contextlib.suppress(OSError):  # the server has dropped it at the end of the first
                    sock.shutdown(socket.SHUT_RDWR)
            ended.set()
            return
        held.set()
        with pytest.raises(RuntimeError, match=r"has left|0 left"):
            rendezvous.exchange("mine")
        assert ended.wait(20)  # a process that ends closes its sockets together
        with pytest.raises(RuntimeError):
            rendezvous.store.all("report")

    assert on_ranks(2, work) == [None, None]


def test_another_program_and_another_run_behind_the_ports_are_passed_by(endpoint):
    other = Endpoint(endpoint.host, endpoint.ports, "another run#0")
    with socket.create_server((endpoint.host, endpoint.ports[0])) as silent:
        results = {}

        def run(name, at):
            results[name] = on_ranks(2, lambda rank: meet(at, rank, 2, 20).exchange(f"{name}{rank}"))

        threads = [threading.Thread(target=run, args=item) for item in (("a", endpoint), ("b", other))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert silent.fileno() >= 0
    assert results == {"a": [["a0", "a1"]] * 2, "b": [["b0", "b1"]] * 2}


@pytest.mark.parametrize(
    "word",
    [b"GET / HTTP/1.1\r\n\r\n", b'{"run": "x"}\n', b"[]\n", b"\x00" * 64 + b"\n", b'{"put": "a", "text": "b"}\n', b""],
)
def test_a_stranger_at_the_endpoint_harms_nobody(endpoint, word):
    def work(rank):
        if rank == 1:
            with at_the_endpoint(endpoint) as sock:
                sock.sendall(word)
                sock.settimeout(0.2)
                with contextlib.suppress(TimeoutError, ConnectionError):
                    assert sock.recv(100) == b""
        rendezvous = meet(endpoint, rank, 2, 20)
        heard = rendezvous.exchange(rank)
        rendezvous.close()
        return heard

    assert on_ranks(2, work) == [[0, 1], [0, 1]]


def test_a_second_rank_of_one_number_is_turned_away(endpoint):
    def work(rank):
        return meet(endpoint, rank, 3, 20).exchange(rank)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(work, 0)
        sock, lines = enter(endpoint, 1, 3)
        say(sock, lines, ready=1)
        with pytest.raises((OSError, Refused)):
            enter(endpoint, 1, 3)
        last = pool.submit(work, 2)  # until then ranks are admitted
        heard = b""
        while b'"here"' not in heard:  # what is given before all have come counts for nothing
            heard += sock.recv(1 << 16)
        say(sock, lines, gather=0, given=1)
        assert first.result() == last.result() == [0, 1, 2]
        sock.close()


def test_endpoints_of_two_runs_differ_and_lie_below_outgoing_ports():
    one, two = Endpoint.at("10.0.0.1", "8118"), Endpoint.at("10.0.0.1", "8119")
    assert one != two
    assert all(20000 <= port < 32000 for endpoint in (one, two) for port in endpoint.ports)
    assert Endpoint.at("10.0.0.1", "8118", 1).ports == one.ports
    assert Endpoint.at("10.0.0.1", "8118", 1).run != one.run


def test_a_call_that_was_given_up_is_not_taken_for_a_rank(endpoint):
    """Rank 1 says who it is and goes, as one does that waits for too long; then it calls again, later."""

    def work(rank):
        if rank == 1:
            while run_secret.read_secret(endpoint.run) is None:
                time.sleep(0.01)
            first, _ = enter(endpoint, 1, 2)
            first.close()
        rendezvous = meet(endpoint, rank, 2, 20)
        heard = rendezvous.exchange(rank)
        rendezvous.close()
        return heard

    assert on_ranks(2, work) == [[0, 1], [0, 1]]


def test_a_late_rank_does_not_act_on_what_the_others_have_given_up(endpoint):
    def work(rank):
        rendezvous = meet(endpoint, rank, 3, 20)
        max_reduce = SocketMaxReduce(rendezvous, 0.3 if rank < 2 else 20)
        if rank == 2:
            time.sleep(1.0)
        max_reduce.propose([1.0])
        with pytest.raises(RuntimeError) as error:
            max_reduce.result()
        return str(error.value)

    said = on_ranks(3, work)
    assert "waits no longer" in said[2]
    assert all("not answered" in text or "waits no longer" in text for text in said[:2])


@pytest.mark.parametrize(
    "word", [b'{"run": 1, "size": 2, "rank": 1e999}', b"[" * 100_000, b'{"ready": 1}', b"\xff\xfe"]
)
def test_no_word_of_a_stranger_ends_the_rendezvous(endpoint, word):
    def work(rank):
        if rank == 1:
            with at_the_endpoint(endpoint) as sock:
                sock.sendall(word + b"\n" * 40)
                assert hung_up(sock)
        rendezvous = meet(endpoint, rank, 2, 20)
        heard = rendezvous.exchange(rank)
        rendezvous.close()
        return heard

    assert on_ranks(2, work) == [[0, 1], [0, 1]]


def test_a_rank_that_cannot_be_is_turned_away(endpoint):
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(on_ranks, 2, lambda rank: meet(endpoint, rank, 2, 1.0), (1,))
        for rank in (2, 2**32 - 1):
            while run_secret.read_secret(endpoint.run) is None:
                time.sleep(0.01)
            with pytest.raises((OSError, Refused)):
                enter(endpoint, rank, 2)
        assert "rank 1 did not call" in str(first.result()[0])


def test_hundreds_of_ranks_that_are_lost_at_once_leave_the_store_to_the_others(endpoint):
    size = 402
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meet, endpoint, 0, size, 30)
        while run_secret.read_secret(endpoint.run) is None:
            time.sleep(0.01)
        others = []
        for rank in range(1, size):
            others.append(enter(endpoint, rank, size))
            say(*others[-1], ready=1)
        rendezvous = first.result()
    say(*others[-1], gather=0, given=1)
    for sock, _ in others[:-1]:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, not an end
        sock.close()
    lost = -1
    while lost < size - 2:  # until the last of them is known to be gone
        time.sleep(0.01)  # each request is answered at once; without a pause thousands would wait before the store's
        with pytest.raises(RuntimeError) as error:
            rendezvous.exchange("mine")
        lost = 8 + int((re.search(r"and (\d+) more", str(error.value)) or [0, -9])[1])
    rendezvous.store.put("hang/0", "here")
    assert rendezvous.store.all("hang") == {0: "here"}
    others[-1][0].close()
    rendezvous.close()


def test_a_forked_child_does_not_keep_its_rank_among_the_living(endpoint):
    """Rank 1 is a process with a child of its own that outlives it, as a data loader's worker does."""
    script = f"""
import os, sys, time
from trainsentry.collectors.ranks.rendezvous import Endpoint, meet
rendezvous = meet(Endpoint({endpoint.host!r}, {endpoint.ports!r}, {endpoint.run!r}), 1, 2, 20)
if os.fork() == 0:
    print("forked", flush=True)
    time.sleep(30)
time.sleep(30)
"""
    rank1 = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        rendezvous = meet(endpoint, 0, 2, 20)
        assert rank1.stdout.readline() == "forked\n"
        rank1.kill()
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="rank 1 left"):
            rendezvous.exchange("mine")
        waited = time.monotonic() - began
    finally:
        os.killpg(rank1.pid, signal.SIGKILL)
        rank1.stdout.close()
        rank1.wait()
    assert waited < 20, "the child lives for 30 seconds"
