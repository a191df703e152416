"""A stranger who knows everything public about a run and replays its ranks' messages learns nothing and stops nothing.

They know its host, its ports, its name and its size, and come before the rank whose place they want.
"""

import contextlib
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

from trainsentry.collectors.ranks.rendezvous import SocketMaxReduce, meet


class Stranger:
    """Calls rank 0 as soon as it is there, and says to be rank 1 of two."""

    def __init__(self, endpoint):
        end = time.monotonic() + 20
        while True:
            try:
                self.sock = socket.create_connection((endpoint.host, endpoint.ports[0]), 5)
                break
            except ConnectionRefusedError:
                assert time.monotonic() < end
                time.sleep(0.01)
        self.heard = b""
        self.say(run=endpoint.run, rank=1, size=2)
        self.listen()
        self.say(ready=1)

    def say(self, **message):
        with contextlib.suppress(OSError):
            self.sock.sendall(json.dumps(message).encode() + b"\n")

    def listen(self):
        """Read for a moment, or until the other side hangs up."""
        self.sock.settimeout(0.5)
        with contextlib.suppress(OSError):
            self.heard += self.sock.recv(1 << 16)


def beside_a_stranger(endpoint, do, work):
    """Have two ranks meet and `work` while a stranger, who was there before rank 1, does its own; return all three."""
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(work, 0)
        stranger = Stranger(endpoint)
        do(stranger)
        second = pool.submit(work, 1)
        try:
            return first.result(), second.result(), stranger
        finally:
            stranger.listen()
            stranger.sock.close()


def test_a_stranger_who_comes_first_takes_no_ranks_place_and_hears_nothing(endpoint):
    def work(rank):
        rendezvous = meet(endpoint, rank, 2, 5)
        told = rendezvous.exchange(f"what rank {rank} tells")
        rendezvous.close()
        return told

    def ask(stranger):
        stranger.say(gather=0, given="what a stranger tells")
        stranger.say(read=0, prefix="")

    *told, stranger = beside_a_stranger(endpoint, ask, work)
    assert told == [["what rank 0 tells", "what rank 1 tells"]] * 2
    assert stranger.heard == b""


def test_a_stranger_does_not_stop_the_training(endpoint):
    def work(rank):
        rendezvous = meet(endpoint, rank, 2, 5)
        max_reduce = SocketMaxReduce(rendezvous, 5)
        max_reduce.propose([0.0])
        agreed = max_reduce.result()
        said = rendezvous.exchange(None)
        rendezvous.close()
        return agreed, said

    def stop(stranger):
        stranger.say(greatest=1, given=[1.0])
        stranger.say(gather=0, given=[False, "because I say so"])

    *agreed, _ = beside_a_stranger(endpoint, stop, work)
    assert agreed == [([0.0], [None, None])] * 2


def test_a_stranger_leaves_no_word(endpoint):
    def work(rank):
        rendezvous = meet(endpoint, rank, 2, 5)
        rendezvous.store.put(f"hang/{rank}", "here")
        rendezvous.exchange(None)
        words = rendezvous.store.all("hang")
        rendezvous.exchange(None)
        rendezvous.close()
        return words

    def leave(stranger):
        stranger.say(put="hang/0", text="rank 0 hangs")

    *words, _ = beside_a_stranger(endpoint, leave, work)
    assert words == [{0: "here", 1: "here"}] * 2
