"""Ranks that meet over sockets: all or none, nobody waits for one who has left, strangers are turned away."""

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

from trainsentry.collectors import hub_rounds, meeting_secret, strangers
from trainsentry.collectors.handshake import Caller, Refused
from trainsentry.collectors.meeting_hub import Hub
from trainsentry.collectors.sealed_lines import SealedLines, text_of
from trainsentry.collectors.socket_line import prove
from trainsentry.collectors.socket_meeting import Agreement, Door, meet


@pytest.fixture
def door():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return Door.at("127.0.0.1", str(free.getsockname()[1]))


def on_ranks(size, work, absent=()):
    """Do `work(rank)` on each rank at once; return what each gives, or the error that it raises."""

    def guarded(rank):
        try:
            return work(rank)
        except RuntimeError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(guarded, [rank for rank in range(size) if rank not in absent]))


def at_the_door(door):
    """Return a connection to rank 0, as soon as it is there."""
    end = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection((door.host, door.ports[0]), 5)
        except ConnectionRefusedError:
            assert time.monotonic() < end
            time.sleep(0.01)


def enter(door, rank, size, secret=None):
    """Call rank 0 and prove oneself, with the run's secret or another; return the socket and its sealed lines."""
    sock = at_the_door(door)
    known = secret or meeting_secret.left_secret(door.run)
    return sock, SealedLines(prove(sock, Caller(known, f"meeting {door.run} of {size}", rank), 5), 2**20)


def say(sock, lines, **message):
    sock.sendall(lines.pack(text_of(message)))


def hung_up(sock):
    """Wait until the other side has hung up."""
    sock.settimeout(20)
    with contextlib.suppress(ConnectionError):
        while sock.recv(1 << 16):
            pass
    return True


def test_all_hear_what_each_gives_and_the_greatest(door):
    def work(rank):
        meeting = meet(door, rank, 4, 20)
        agreement = Agreement(meeting, 20)
        heard = [meeting.exchange({"rank": rank, "round": i}) for i in range(3)]
        agreed = []
        for i in range(5):
            agreement.propose([rank * i, -rank, float("-inf")])
            agreed.append(agreement.result())
        meeting.close()
        return heard, agreed, agreement.result()

    found = on_ranks(4, work)
    assert found[0] == found[1] == found[2] == found[3]
    heard, agreed, nothing = found[0]
    assert heard[2] == [{"rank": rank, "round": 2} for rank in range(4)]
    assert agreed[4] == [12, 0, float("-inf")]
    assert nothing is None


def test_a_proposal_is_answered_while_the_rank_goes_on(door):
    order = []

    def work(rank):
        meeting = meet(door, rank, 2, 20)
        agreement = Agreement(meeting, 20)
        agreement.propose([rank])
        order.append("proposed")
        meeting.exchange(None)
        agreed = agreement.result()
        meeting.close()
        return agreed

    assert on_ranks(2, work) == [[1], [1]]
    assert order == ["proposed", "proposed"]


def test_who_has_not_come_is_named_to_those_who_have(door):
    found = on_ranks(4, lambda rank: meet(door, rank, 4, 1.0), absent=(2,))
    assert len(found) == 3
    assert all(str(error).startswith("rank 2 did not call watch() within 1 s") for error in found)


def test_without_rank_0_the_others_give_up(door):
    [found] = on_ranks(2, lambda rank: meet(door, rank, 2, 0.5), absent=(0,))
    assert "rank 0 was not found at 127.0.0.1" in str(found)


def test_nobody_waits_for_a_rank_that_has_left(door):
    def work(rank):
        meeting = meet(door, rank, 3, 20)
        agreement = Agreement(meeting, 60)
        agreement.propose([rank])
        first = agreement.result()
        if rank == 1:
            meeting.close()
            return first
        began = time.monotonic()
        agreement.propose([rank])
        with pytest.raises(RuntimeError, match="rank 1 left"):
            agreement.result()
        meeting.board.put(f"report/{rank}", "still here")
        while len(words := meeting.board.all("report")) < 2 and time.monotonic() - began < 20:
            time.sleep(0.01)
        waited = time.monotonic() - began
        meeting.close(broken=True)
        return first, words, waited < 30

    found = on_ranks(3, work)
    assert found[1] == [2]
    assert found[0] == found[2] == ([2], {0: "still here", 2: "still here"}, True)


def test_the_end_of_the_rank_that_holds_the_meeting_is_noticed(door):
    held = threading.Event()

    def work(rank):
        meeting = meet(door, rank, 2, 20)
        if rank == 0:
            assert held.wait(20)
            for sock in [*meeting._hub._ranks]:
                sock.shutdown(socket.SHUT_RDWR)
            return
        held.set()
        with pytest.raises(RuntimeError, match=r"has left|0 left"):
            meeting.exchange("mine")
        with pytest.raises(RuntimeError):
            meeting.board.all("report")

    assert on_ranks(2, work) == [None, None]


def test_another_program_and_another_run_behind_the_ports_are_passed_by(door):
    other = Door(door.host, door.ports, "another run#0")
    with socket.create_server((door.host, door.ports[0])) as silent:
        results = {}

        def run(name, at):
            results[name] = on_ranks(2, lambda rank: meet(at, rank, 2, 20).exchange(f"{name}{rank}"))

        threads = [threading.Thread(target=run, args=item) for item in (("a", door), ("b", other))]
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
def test_a_stranger_at_the_door_harms_nobody(door, word):
    def work(rank):
        if rank == 1:
            with at_the_door(door) as sock:
                sock.sendall(word)
                sock.settimeout(0.2)
                with contextlib.suppress(TimeoutError, ConnectionError):
                    assert sock.recv(100) == b""
        meeting = meet(door, rank, 2, 20)
        heard = meeting.exchange(rank)
        meeting.close()
        return heard

    assert on_ranks(2, work) == [[0, 1], [0, 1]]


def test_a_second_rank_of_one_number_is_turned_away(door):
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(on_ranks, 3, lambda rank: meet(door, rank, 3, 20).exchange(rank), (1,))
        sock, lines = enter(door, 1, 3)
        say(sock, lines, ready=1)
        with pytest.raises((OSError, Refused)):
            enter(door, 1, 3)
        say(sock, lines, gather=0, given=1)
        assert first.result() == [[0, 1, 2]] * 2
        sock.close()


def test_doors_of_two_runs_differ_and_lie_below_outgoing_ports():
    one, two = Door.at("10.0.0.1", "8118"), Door.at("10.0.0.1", "8119")
    assert one != two
    assert all(20000 <= port < 32000 for door in (one, two) for port in door.ports)
    assert Door.at("10.0.0.1", "8118", 1).ports == one.ports
    assert Door.at("10.0.0.1", "8118", 1).run != one.run


def test_a_call_that_was_given_up_is_not_taken_for_a_rank(door):
    """Rank 1 says who it is and goes, as one does that waits for too long; then it calls again, later."""

    def work(rank):
        if rank == 1:
            while meeting_secret.left_secret(door.run) is None:
                time.sleep(0.01)
            first, _ = enter(door, 1, 2)
            first.close()
        meeting = meet(door, rank, 2, 20)
        heard = meeting.exchange(rank)
        meeting.close()
        return heard

    assert on_ranks(2, work) == [[0, 1], [0, 1]]


def test_a_late_rank_does_not_act_on_what_the_others_have_given_up(door):
    def work(rank):
        meeting = meet(door, rank, 3, 20)
        agreement = Agreement(meeting, 0.3 if rank < 2 else 20)
        if rank == 2:
            time.sleep(1.0)
        agreement.propose([1.0])
        with pytest.raises(RuntimeError) as error:
            agreement.result()
        return str(error.value)

    said = on_ranks(3, work)
    assert "waits no longer" in said[2]
    assert all("not answered" in text or "waits no longer" in text for text in said[:2])


@pytest.mark.parametrize(
    "word", [b'{"run": 1, "size": 2, "rank": 1e999}', b"[" * 100_000, b'{"ready": 1}', b"\xff\xfe"]
)
def test_no_word_of_a_stranger_ends_the_meeting(door, word):
    def work(rank):
        if rank == 1:
            with at_the_door(door) as sock:
                sock.sendall(word + b"\n" * 40)
                assert hung_up(sock)
        meeting = meet(door, rank, 2, 20)
        heard = meeting.exchange(rank)
        meeting.close()
        return heard

    assert on_ranks(2, work) == [[0, 1], [0, 1]]


def test_a_rank_that_cannot_be_is_turned_away(door):
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(on_ranks, 2, lambda rank: meet(door, rank, 2, 1.0), (1,))
        for rank in (2, 2**32 - 1):
            while meeting_secret.left_secret(door.run) is None:
                time.sleep(0.01)
            with pytest.raises((OSError, Refused)):
                enter(door, rank, 2)
        assert "rank 1 did not call" in str(first.result()[0])


def test_hundreds_of_ranks_that_are_lost_at_once_leave_the_board_to_the_others(door):
    size = 402
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meet, door, 0, size, 30)
        while meeting_secret.left_secret(door.run) is None:
            time.sleep(0.01)
        others = []
        for rank in range(1, size):
            others.append(enter(door, rank, size))
            say(*others[-1], ready=1)
        meeting = first.result()
    say(*others[-1], gather=0, given=1)
    for sock, _ in others[:-1]:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, not an end
        sock.close()
    lost = -1
    while lost < size - 2:  # until the last of them is known to be gone
        with pytest.raises(RuntimeError) as error:
            meeting.exchange("mine")
        lost = 8 + int((re.search(r"and (\d+) more", str(error.value)) or [0, -9])[1])
    meeting.board.put("hang/0", "here")
    assert meeting.board.all("hang") == {0: "here"}
    others[-1][0].close()
    meeting.close()


def test_a_forked_child_does_not_keep_its_rank_among_the_living(door):
    """Rank 1 is a process with a child of its own that outlives it, as a data loader's worker does."""
    script = f"""
import os, sys, time
from trainsentry.collectors.socket_meeting import Door, meet
meeting = meet(Door({door.host!r}, {door.ports!r}, {door.run!r}), 1, 2, 20)
if os.fork() == 0:
    print("forked", flush=True)
    time.sleep(30)
time.sleep(30)
"""
    rank1 = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        meeting = meet(door, 0, 2, 20)
        assert rank1.stdout.readline() == "forked\n"
        rank1.kill()
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="rank 1 left"):
            meeting.exchange("mine")
        waited = time.monotonic() - began
    finally:
        os.killpg(rank1.pid, signal.SIGKILL)
        rank1.stdout.close()
        rank1.wait()
    assert waited < 20, "the child lives for 30 seconds"


# ------------------------------------------------------------------ strangers


def test_a_stranger_cannot_make_the_ranks_agree_on_a_stop(door):
    """It proves itself with a secret of its own choice, and proposes what a rank does that wants to stop."""

    def work(rank):
        meeting = meet(door, rank, 2, 20)
        agreement = Agreement(meeting, 20)
        agreement.propose([0.0])
        agreed = agreement.result()
        meeting.close()
        return agreed

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(work, 0)
        for secret in (b"x" * 64, door.run.encode(), b""):
            with pytest.raises((OSError, Refused)):
                enter(door, 1, 2, secret or b"\0")
        assert pool.submit(work, 1).result() == first.result() == [0.0]


@pytest.mark.parametrize("spoil", ["change", "repeat", "put in"])
def test_who_can_write_into_a_ranks_connection_can_end_it_and_no_more(door, spoil):
    """A stranger sits on the line between rank 1 and rank 0, and passes on what both say, but for one line."""
    secret = "a secret of the run"
    between = socket.create_server(("127.0.0.1", 0))
    seen = Door("127.0.0.1", (between.getsockname()[1],), door.run)

    def pass_on(source, target, spoil=None):
        while data := source.recv(1 << 16):
            if spoil is not None and b'"greatest"' in data:
                stop = data.replace(b"0.0", b"1.0") if spoil == "change" else data * 2
                data = b"0" * 32 + b'{"greatest": 1, "given": [1.0]}\n' if spoil == "put in" else stop
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)

    def stand_between():
        near, _ = between.accept()
        with near, at_the_door(door) as far, contextlib.suppress(OSError):
            answers = threading.Thread(target=lambda: contextlib.suppress(OSError).__enter__() or pass_on(far, near))
            answers.daemon = True
            answers.start()
            pass_on(near, far, spoil)

    def work(rank):
        meeting = meet(door if rank == 0 else seen, rank, 2, 20)
        agreement = Agreement(meeting, 20)
        agreed = []
        with contextlib.suppress(RuntimeError):
            for _ in range(2):
                agreement.propose([0.0])
                agreed.append(agreement.result())
        meeting.close(broken=True)
        return agreed

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(meeting_secret.SECRET, secret)
        threading.Thread(target=stand_between, daemon=True).start()
        found = on_ranks(2, work)
    between.close()
    assert all(agreed in ([], [[0.0]]) for agreed in found), "nobody agrees on what no rank has proposed"


def test_strangers_at_the_door_are_few_and_leave_soon(door):
    clock = [0.0]
    with socket.create_server((door.host, door.ports[0])) as listening:
        here = strangers.Strangers(listening, b"secret", "meeting", lambda: clock[0], most=4)
        silent = [socket.create_connection((door.host, door.ports[0])) for _ in range(20)]
        end = time.monotonic() + 20
        while len(here) < 4 and time.monotonic() < end:
            assert not list(here.proven())
        clock[0] = strangers.STRANGER_SECONDS
        assert not list(here.proven())
        clock[0] *= 3
        assert not list(here.proven())
        assert len(here) == 0
        for sock in silent:
            sock.close()


# ------------------------------------------------------------------ ranks whose words make no sense

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
    {"put": "hang/1", "text": "x" * (hub_rounds.LONGEST_WORD + 1)},
    {"read": 0, "prefix": 7},
    {"read": None, "prefix": ""},
    {"no such": "message"},
]


@pytest.mark.parametrize("nonsense", [*NONSENSE, b"[" * 100_000, b"[]", b"7", b"\xff", b"x" * 2**21])
def test_a_rank_that_sends_nonsense_is_let_go_and_the_board_is_still_there(door, nonsense):
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meet, door, 0, 2, 20)
        while meeting_secret.left_secret(door.run) is None:
            time.sleep(0.01)
        sock, lines = enter(door, 1, 2)
        say(sock, lines, ready=1)
        meeting = first.result()
    with contextlib.suppress(ConnectionError):
        sock.sendall(lines.pack(nonsense if isinstance(nonsense, bytes) else text_of(nonsense)))
    assert hung_up(sock)
    sock.close()
    with pytest.raises(RuntimeError, match="rank 1 left"):
        meeting.exchange("mine")
    meeting.board.put("hang/0", "here")
    assert meeting.board.all("hang") == {0: "here"}
    meeting.close()


def test_of_proposals_of_two_lengths_rank_0s_counts_and_the_other_rank_is_let_go(door):
    def work(rank):
        meeting = meet(door, rank, 3, 20)
        agreement = Agreement(meeting, 20)
        agreement.propose([0.0] * (2 if rank == 2 else 3))
        with pytest.raises(RuntimeError) as error:
            agreement.result()
        meeting.close(broken=True)
        return str(error.value)

    said = on_ranks(3, work)
    assert all("rank 2 left" in text for text in said[:2])


def test_rounds_and_words_of_a_rank_are_bounded():
    rounds, words = hub_rounds.Rounds(2), hub_rounds.Words()
    for number in range(hub_rounds.MOST_ROUNDS):
        rounds.take("gather", number, 1, "x")
    with pytest.raises(ValueError, match="rounds"):
        rounds.take("gather", hub_rounds.MOST_ROUNDS, 1, "x")
    for number in range(hub_rounds.MOST_WORDS):
        words.put(1, f"word{number}/1", "x")
    words.put(1, "word0/1", "y")
    with pytest.raises(ValueError, match="kept"):
        words.put(1, "one more/1", "x")
    assert len(words.under("")) == hub_rounds.MOST_WORDS


# ------------------------------------------------------------------ the secret


def test_ranks_share_a_secret_that_is_not_what_was_given_nor_that_of_another_meeting(door, monkeypatch):
    monkeypatch.setenv(meeting_secret.SECRET, "a secret of the run")
    found = []
    for number in range(2):
        at = Door(door.host, door.ports, f"run#{number}")

        def work(rank, at=at):
            meeting = meet(at, rank, 2, 20)
            meeting.exchange(None)
            meeting.close()
            return meeting.secret

        found.append(on_ranks(2, work))
    assert found[0][0] == found[0][1] != found[1][0] == found[1][1]
    assert all(len(bytes.fromhex(secret)) == 32 for secrets in found for secret in secrets)


def test_a_secret_that_is_left_is_this_users_alone_and_gone_once_all_have_come(door):
    run = door.run
    secret = meeting_secret.leave_secret(run)
    path = meeting_secret._path_of(run)
    assert path.stat().st_mode & 0o777 == 0o600
    assert meeting_secret.left_secret(run) == secret != meeting_secret.leave_secret(run)
    meetings = on_ranks(2, lambda rank: meet(door, rank, 2, 20))
    assert not path.exists()
    for meeting in meetings:
        meeting.line.close()


@pytest.mark.parametrize("wrong", ["mode", "link", "directory", "fifo", "second name"])
def test_a_secret_that_others_may_know_is_refused(door, wrong, tmp_path):
    path = meeting_secret._path_of(door.run)
    meeting_secret.leave_secret(door.run)
    try:
        if wrong == "mode":
            path.chmod(0o644)
        elif wrong == "second name":
            os.link(path, tmp_path / "other")
        else:
            path.rename(tmp_path / "other")
            makes = {"link": lambda: path.symlink_to(tmp_path / "other"), "directory": path.mkdir,
                     "fifo": lambda: os.mkfifo(path, 0o600)}  # fmt: skip
            makes[wrong]()
        with pytest.raises(PermissionError, match="cannot be trusted"):
            meeting_secret.left_secret(door.run)
        [error] = on_ranks(2, lambda rank: meet(door, rank, 2, 20), absent=(0,))
        assert "cannot be trusted" in str(error)
    finally:
        path.rmdir() if wrong == "directory" else path.unlink()


def test_ranks_of_several_hosts_without_a_secret_trust_nobody(monkeypatch):
    """The address is one of documentation (RFC 5737), which no host has."""
    with pytest.raises(RuntimeError, match=meeting_secret.SECRET):
        meet(Door.at("192.0.2.1", "8118"), 1, 2, 20)


def test_a_secret_that_is_too_short_is_refused_and_not_told(door, monkeypatch):
    monkeypatch.setenv(meeting_secret.SECRET, "hunter2")
    with pytest.raises(ValueError, match="got 7 characters") as error:
        meet(door, 0, 2, 20)
    assert "hunter2" not in str(error.value)


def test_ranks_meet_without_a_secret_only_where_it_was_asked_for_and_say_so(door, monkeypatch, caplog):
    monkeypatch.setenv(meeting_secret.UNAUTHENTICATED, "1")

    def work(rank):
        meeting = meet(door, rank, 2, 20)
        heard = meeting.exchange(rank)
        meeting.close()
        return heard

    assert on_ranks(2, work) == [[0, 1]] * 2
    assert "can stop the training" in caplog.text


def test_ranks_with_different_secrets_do_not_meet(door, monkeypatch):
    seen = []
    with socket.create_server((door.host, door.ports[0])) as listening:
        hub = Hub(listening.dup(), b"one secret", f"meeting {door.run} of 2", 2, 0.2)
        monkeypatch.setenv(meeting_secret.SECRET, "another secret of the run")
        seen = on_ranks(2, lambda rank: meet(door, rank, 2, 0.2), absent=(0,))
        hub.wait(20)
    assert "rank 0 was not found" in str(seen[0])
