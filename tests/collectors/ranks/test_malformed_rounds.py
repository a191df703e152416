"""A rank that sends nonsense loses its place in the rendezvous; it stops no other rank and takes no memory."""

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from rendezvous_endpoint import enter, hung_up, on_ranks, say

from trainsentry.collectors.ranks import rounds, run_secret
from trainsentry.collectors.ranks.connection import text_of
from trainsentry.collectors.ranks.rendezvous import SocketMaxReduce, meet

NONSENSE = [
    {"greatest": 1, "given": ["a", "b"]},
    {"greatest": 1, "given": [float("nan"), 0.0]},
    {"greatest": 1, "given": None},
    {"greatest": "first", "given": [0.0, 0.0]},
    {"gather": [1], "given": 1},
    {"gather": -1, "given": 1},
    {"gather": 0},
    {"put": "hang/0", "text": "rank 0 says nothing of the kind"},
    {"put": ["hang/1"], "text": "x"},
    {"put": "hang/1", "text": "x" * (rounds.LONGEST_TEXT + 1)},
    {"read": 0, "prefix": 7},
    {"read": None, "prefix": ""},
    {"no such": "message"},
]


@pytest.mark.parametrize("nonsense", [*NONSENSE, b"[" * 100_000, b"[]", b"7", b"\xff", b"x" * 2**21])
def test_a_rank_that_sends_nonsense_is_let_go_and_the_store_is_still_there(endpoint, nonsense):
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meet, endpoint, 0, 2, 20)
        while run_secret.read_secret(endpoint.run) is None:
            time.sleep(0.01)
        sock, lines = enter(endpoint, 1, 2)
        say(sock, lines, ready=1)
        rendezvous = first.result()
    with contextlib.suppress(ConnectionError):
        sock.sendall(lines.pack(nonsense if isinstance(nonsense, bytes) else text_of(nonsense)))
    assert hung_up(sock)
    sock.close()
    with pytest.raises(RuntimeError, match="rank 1 left"):
        rendezvous.exchange("mine")
    rendezvous.store.put("hang/0", "here")
    assert rendezvous.store.all("hang") == {0: "here"}
    rendezvous.close()


def test_of_proposals_of_two_lengths_rank_0s_counts_and_the_other_rank_is_let_go(endpoint):
    def work(rank):
        rendezvous = meet(endpoint, rank, 3, 20)
        max_reduce = SocketMaxReduce(rendezvous, 20)
        max_reduce.propose([0.0] * (2 if rank == 2 else 3))
        with pytest.raises(RuntimeError) as error:
            max_reduce.result()
        rendezvous.close(broken=True)
        return str(error.value)

    said = on_ranks(3, work)
    assert all("rank 2 left" in text for text in said[:2])


def test_rounds_and_store_entries_of_a_rank_are_bounded():
    kept, entries = rounds.Rounds(2), rounds.StoreEntries()
    for number in range(rounds.MOST_ROUNDS):
        kept.take("gather", number, 1, "x")
    with pytest.raises(ValueError, match="rounds"):
        kept.take("gather", rounds.MOST_ROUNDS, 1, "x")
    for number in range(rounds.MOST_ENTRIES):
        entries.put(1, f"word{number}/1", "x")
    entries.put(1, "word0/1", "y")
    with pytest.raises(ValueError, match="stored"):
        entries.put(1, "one more/1", "x")
    assert len(entries.under("")) == rounds.MOST_ENTRIES
