"""The metrics endpoint answers every request, and idle connections do not block it."""

import contextlib
import socket
import threading
import time
import urllib.request

import pytest

from trainsentry.exporters.metrics.prometheus_families import registry_of
from trainsentry.exporters.metrics.prometheus_server import MAX_CONNECTIONS, start_http_server


@pytest.fixture
def server(tmp_path):
    made, thread = start_http_server(0, "127.0.0.1", registry_of(tmp_path))
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


def threads_of(server):
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def test_silent_connections_are_few_and_keep_nobody_from_the_metrics(server):
    silent = [socket.create_connection(server.server_address) for _ in range(4 * MAX_CONNECTIONS)]
    page = urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=30).read().decode()
    assert "trainsentry_run_info" in page
    end = time.monotonic() + 30
    while threads_of(server) > MAX_CONNECTIONS:
        assert time.monotonic() < end
        time.sleep(0.01)
    for sock in silent:
        sock.close()


@pytest.mark.parametrize("said", [b"\0" * 100, b"GET /" + b"x" * 100_000, b"[" * 5000 + b"\r\n\r\n", b"\r\n\r\n"])
def test_what_is_no_request_ends_its_connection_and_no_more(server, said, capfd):
    with socket.create_connection(server.server_address) as sock, contextlib.suppress(OSError):
        sock.sendall(said)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 16):
            pass
    page = urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=30).read().decode()
    assert "trainsentry_run_info" in page
    assert "Traceback" not in capfd.readouterr().err
