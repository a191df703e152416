"""Ranks recognise each other by a secret, which only this user can read and no stranger can replace."""

import contextlib
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from rendezvous_endpoint import at_the_endpoint, enter, on_ranks

from trainsentry.collectors.ranks import run_secret, unproven_callers
from trainsentry.collectors.ranks.handshake import Refused
from trainsentry.collectors.ranks.rendezvous import Endpoint, SocketMaxReduce, meet
from trainsentry.collectors.ranks.rendezvous_server import RendezvousServer


def test_a_stranger_cannot_make_the_ranks_agree_on_a_stop(endpoint):
    """It proves itself with a secret of its own choice, and proposes what a rank does that wants to stop."""

    def work(rank):
        rendezvous = meet(endpoint, rank, 2, 20)
        max_reduce = SocketMaxReduce(rendezvous, 20)
        max_reduce.propose([0.0])
        agreed = max_reduce.result()
        rendezvous.close()
        return agreed

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(work, 0)
        for secret in (b"x" * 64, endpoint.run.encode(), b""):
            with pytest.raises((OSError, Refused)):
                enter(endpoint, 1, 2, secret or b"\0")
        assert pool.submit(work, 1).result() == first.result() == [0.0]


def pass_on(source, target, spoil=None):
    """Forward everything that one side sends to the other, except the line with a proposal."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            if spoil is not None and b'"greatest"' in data:
                data = spoil(data)
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


SPOILT = {
    "change": lambda data: data.replace(b"0.0", b"1.0"),
    "repeat": lambda data: data * 2,
    "put in": lambda _: b"0" * 32 + b'{"greatest": 1, "given": [1.0]}\n',
}


@pytest.mark.parametrize("spoil", SPOILT)
def test_who_can_write_into_a_ranks_connection_can_end_it_and_no_more(endpoint, spoil, monkeypatch):
    """A stranger sits on the line between rank 1 and rank 0."""
    monkeypatch.setenv(run_secret.SECRET, "a secret of the run")
    between = socket.create_server(("127.0.0.1", 0))
    seen = Endpoint("127.0.0.1", (between.getsockname()[1],), endpoint.run)

    def stand_between():
        near, far = between.accept()[0], at_the_endpoint(endpoint)
        threading.Thread(target=pass_on, args=(far, near), daemon=True).start()
        pass_on(near, far, SPOILT[spoil])

    def work(rank):
        rendezvous = meet(endpoint if rank == 0 else seen, rank, 2, 20)
        max_reduce = SocketMaxReduce(rendezvous, 20)
        agreed = []
        with contextlib.suppress(RuntimeError):
            for _ in range(2):
                max_reduce.propose([0.0])
                agreed.append(max_reduce.result())
        rendezvous.close(broken=True)
        return agreed

    threading.Thread(target=stand_between, daemon=True).start()
    found = on_ranks(2, work)
    between.close()
    assert all(agreed in ([], [[0.0]]) for agreed in found), "nobody agrees on what no rank has proposed"


def test_strangers_at_the_endpoint_are_few_and_leave_soon(endpoint):
    clock = [0.0]
    with socket.create_server((endpoint.host, endpoint.ports[0])) as listening:
        here = unproven_callers.UnprovenCallers(listening, b"secret", "meeting", lambda: clock[0], most=4)
        silent = [socket.create_connection((endpoint.host, endpoint.ports[0])) for _ in range(20)]
        end = time.monotonic() + 20
        while len(here) < 4 and time.monotonic() < end:
            assert not list(here.proven())
        clock[0] = unproven_callers.PROOF_SECONDS
        assert not list(here.proven())
        clock[0] *= 3
        assert not list(here.proven())
        assert len(here) == 0
        for sock in silent:
            sock.close()


def test_ranks_share_a_secret_that_is_not_what_was_given_nor_that_of_another_rendezvous(endpoint, monkeypatch):
    monkeypatch.setenv(run_secret.SECRET, "a secret of the run")
    found = []
    for number in range(2):
        at = Endpoint(endpoint.host, endpoint.ports, f"run#{number}")

        def work(rank, at=at):
            rendezvous = meet(at, rank, 2, 20)
            rendezvous.exchange(None)
            rendezvous.close()
            return rendezvous.secret

        found.append(on_ranks(2, work))
    assert found[0][0] == found[0][1] != found[1][0] == found[1][1]
    assert all(len(bytes.fromhex(secret)) == 32 for secrets in found for secret in secrets)


def test_a_secret_that_is_left_is_this_users_alone_and_gone_once_all_have_come(endpoint):
    run = endpoint.run
    secret = run_secret.write_secret(run)
    path = run_secret._path_of(run)
    assert path.stat().st_mode & 0o777 == 0o600
    assert run_secret.read_secret(run) == secret != run_secret.write_secret(run)
    made = on_ranks(2, lambda rank: meet(endpoint, rank, 2, 20))
    assert not path.exists()
    for rendezvous in made:
        rendezvous.connection.close()


@pytest.mark.parametrize("wrong", ["mode", "link", "directory", "fifo", "second name"])
def test_a_secret_that_others_may_know_is_refused(endpoint, wrong, tmp_path):
    path = run_secret._path_of(endpoint.run)
    run_secret.write_secret(endpoint.run)
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
            run_secret.read_secret(endpoint.run)
        [error] = on_ranks(2, lambda rank: meet(endpoint, rank, 2, 20), absent=(0,))
        assert "cannot be trusted" in str(error)
    finally:
        path.rmdir() if wrong == "directory" else path.unlink()


def test_ranks_of_several_hosts_without_a_secret_trust_nobody(monkeypatch):
    """The address is one of documentation (RFC 5737), which no host has."""
    with pytest.raises(RuntimeError, match=run_secret.SECRET):
        meet(Endpoint.at("192.0.2.1", "8118"), 1, 2, 20)


def test_a_secret_that_is_too_short_is_refused_and_not_told(endpoint, monkeypatch):
    monkeypatch.setenv(run_secret.SECRET, "hunter2")
    with pytest.raises(ValueError, match="got 7 characters") as error:
        meet(endpoint, 0, 2, 20)
    assert "hunter2" not in str(error.value)


def test_ranks_meet_without_a_secret_only_where_it_was_asked_for_and_say_so(endpoint, monkeypatch, caplog):
    monkeypatch.setenv(run_secret.UNAUTHENTICATED, "1")

    def work(rank):
        rendezvous = meet(endpoint, rank, 2, 20)
        heard = rendezvous.exchange(rank)
        rendezvous.close()
        return heard

    assert on_ranks(2, work) == [[0, 1]] * 2
    assert "can stop the training" in caplog.text


def test_ranks_with_different_secrets_do_not_meet(endpoint, monkeypatch):
    seen = []
    with socket.create_server((endpoint.host, endpoint.ports[0])) as recorder_address:
        server = RendezvousServer(recorder_address.dup(), b"one secret", f"meeting {endpoint.run} of 2", 2, 0.2)
        monkeypatch.setenv(run_secret.SECRET, "another secret of the run")
        seen = on_ranks(2, lambda rank: meet(endpoint, rank, 2, 0.2), absent=(0,))
        server.wait(20)
    assert "rank 0 was not found" in str(seen[0])
