"""A server of runs gives nothing but their numbers, to nobody but this machine's own pages."""

import contextlib
import http.client
import json
import pickle
import socket
from pathlib import Path

import pytest
from recorded_runs import make_run
from served import served

MARK = "not-for-your-eyes"


class Planted:
    """Runs when it is unpickled."""

    def __reduce__(self):
        return (open, (f"/tmp/{MARK}", "w"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run with hostile names, links that lead out of it, and files that are none of its own."""
    top = tmp_path_factory.mktemp("top")
    outside = make_run(top / "outside", name=MARK)
    (top / "secret.json").write_text(json.dumps({"configuration": {"key": MARK}}))
    runs = top / "runs"
    run = make_run(runs / "run", name="<img src=x onerror=alert(1)>")
    (run / "rank0" / "secret_0-999.csv").symlink_to(outside / "rank0" / "gradient_0-999.csv")
    (run / "rank7").symlink_to(outside / "rank0")
    (runs / "linked").symlink_to(outside)
    wrong = make_run(runs / "wrong")
    (wrong / "run.json").unlink()
    (wrong / "run.json").symlink_to(top / "secret.json")
    (run / "rank0" / "gradient_1000-1999.parquet").write_bytes(pickle.dumps(Planted()))
    return runs


@pytest.fixture(scope="module")
def server(folder):
    """The server of these runs."""
    with served(folder) as server:
        yield server


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.json",
        "/%2e%2e/secret.json",
        "/run/run.json",
        "/static/../secret.json",
        "//etc/passwd",
        "/api/state?run=../outside",
        "/api/state?run=%2e%2e%2foutside",
        "/api/state?run=linked",
        "/api/state?run=run/rank0",
        "/api/state?run=/etc",
        "/api/points?run=run&rank=../../outside/rank0&table=gradient&name=x",
        "/api/points?run=run&table=../../outside/rank0/gradient&name=x",
        "/api/points?run=run&table=secret&name=" + MARK,
        "/api/points?run=run&rank=7&table=gradient&name=" + MARK,
        "/api/state?run=run%00",
    ],
)
def test_no_path_leads_out_of_the_runs(server, path):
    status, _, body = server.raw(path)
    assert MARK.encode() not in body.replace(path.encode(), b"").replace(f"name={MARK}".encode(), b"")
    assert status in {400, 404} or json.loads(body).get("steps") == []


def test_a_run_whose_own_file_leads_elsewhere_is_not_shown(server):
    status, _, body = server.raw("/api/state?run=wrong")
    assert MARK.encode() not in body
    assert (status, json.loads(body)["state"]) == (200, "unreadable")
    assert "run.json: leads out of the run" in json.loads(body)["problems"]


def test_a_name_that_dns_made_lead_here_is_refused_and_an_address_is_not(server):
    for host in ("evil.example", f"evil.example:{server.port}", "localhost.evil.example", "", "127.0.0.1.evil.example"):
        assert server.raw("/api/runs", {"Host": host})[0] in {400, 403}, host
        assert server.raw("/", {"Host": host})[0] in {400, 403}, host
    for host in ("localhost", f"127.0.0.1:{server.port}", "[::1]:1", "LOCALHOST:80", socket.gethostname()):
        assert server.raw("/api/runs", {"Host": host})[0] == 200, host


def test_no_other_page_can_read_it(server):
    own = {"Host": f"localhost:{server.port}"}
    for headers in (
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": f"http://localhost:{server.port + 1}"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "script"},
    ):
        assert server.raw("/api/runs", own | headers)[0] == 403, headers
    status, headers, _ = server.raw("/api/runs", own | {"Origin": f"http://localhost:{server.port}"})
    assert status == 200
    assert not [name for name in headers if name.lower().startswith("access-control")]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert server.raw("/", own | link)[0] == 200  # a link in a mail opens the page
    assert server.raw("/", own | link | {"Sec-Fetch-Dest": "iframe"})[0] == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(server, folder, method):
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    assert server.raw("/api/state?run=run", method=method)[0] == 405
    server.raw("/", method=method)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == before


def test_the_page_is_whole_in_itself_and_runs_its_own_script_alone(server):
    _, headers, body = server.raw("/")
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "script-src 'sha256-" in policy
    assert b"http://" not in body
    assert b"https://" not in body
    assert b"innerHTML" not in body


def test_a_file_of_another_kind_is_a_line_in_the_answer_and_never_unpickled(server):
    status, answer = server.ask("points", run="run", table="gradient", name="layers.1.mlp.weight")
    assert (status, len(answer["steps"])) == (200, 40)
    assert any("gradient_1000-1999.parquet" in line for line in answer["problems"])
    assert not Path(f"/tmp/{MARK}").exists()


def test_large_and_odd_requests_are_refused_and_the_server_lives_on(server):
    with contextlib.suppress(http.client.RemoteDisconnected):  # what is too long for a header ends the connection
        assert server.raw("/api/state?run=" + "x" * 20_000)[0] in {400, 414, 431}
    assert server.raw("/api/state?" + "&".join(f"k{i}=1" for i in range(100)))[0] == 400
    assert server.raw("/api/points?run=run&first=" + "9" * 5000)[0] == 404
    assert server.raw("/api/series?run=run&words=%ff%fe")[0] == 200
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999\r\n\r\n")
        assert b"200 OK" not in raw.recv(4096)[:20]
    assert server.ask("state", run="run")[0] == 200
