"""Serves the page and its answers over HTTP, read-only, to browsers that ask for it by this machine's name.

Tornado does the HTTP: it is well kept, Bokeh brings it anyway, and it bounds headers, bodies and idle connections.

Who may read: the server is bound to loopback unless told otherwise. A page elsewhere cannot read it: there is no
permission for other origins, requests that a browser marks as coming from another site are refused, and so is a `Host`
that is neither an address nor this machine's name, as after DNS rebinding. What may be read: the answers of `Answers`,
which names no path.
"""

import asyncio
import contextlib
import ipaddress
import json
import math
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final
from urllib.parse import urlsplit

import tornado.httpserver
import tornado.netutil
import tornado.web

from trainsentry.exporters.files.foreign_files import InputError
from trainsentry.exporters.live.answers import Answers, Query
from trainsentry.exporters.live.page import page

THREADS: Final = 3
"""Answers that are made at once; the machine is the training's."""

MAX_WAITING: Final = 64
"""Requests that wait for an answer; a page has about six at once."""

MAX_HEADER_BYTES: Final = 1 << 14
MAX_PARAMETERS: Final = 16
IDLE_SECONDS: Final = 60.0
"""Seconds after which an idle connection is closed."""


def allowed_hosts(host: str) -> frozenset[str]:
    """Return the names by which a browser may ask for a server bound to `host`; addresses are allowed in any case."""
    return frozenset({"localhost", host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()} - {""})


def is_own_host(header: str, names: frozenset[str]) -> bool:
    """Return whether a `Host` header names this machine: DNS can make any other name lead here, but no address.

    >>> is_own_host("127.0.0.1:8600", frozenset()), is_own_host("[::1]:8600", frozenset())
    (True, True)
    >>> is_own_host("evil.example:8600", frozenset({"localhost"})), is_own_host("localhost", frozenset({"localhost"}))
    (False, True)
    """
    try:
        name = (urlsplit(f"//{header}").hostname or "").rstrip(".")
    except ValueError:
        return False
    if name in names:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class ReadOnly(tornado.web.RequestHandler):
    """Answers GET and HEAD alone, and nothing that another site has a browser ask for."""

    def initialize(self, names: frozenset[str]) -> None:
        """Take the names of this machine."""
        self.names = names

    def set_default_headers(self) -> None:
        """Say what a browser may do with an answer: nothing but show it here."""
        self.clear_header("Server")
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("Cross-Origin-Resource-Policy", "same-origin")
        self.set_header("Cross-Origin-Opener-Policy", "same-origin")
        self.set_header("Referrer-Policy", "no-referrer")
        self.set_header("Cache-Control", "no-store")
        self.set_header("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'")

    def prepare(self) -> None:
        """Refuse a request that may not be answered."""
        headers = self.request.headers
        if not is_own_host(headers.get("Host", ""), self.names):
            raise tornado.web.HTTPError(403, reason="this server has another name")
        origin = headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc.lower() != headers["Host"].lower():
            raise tornado.web.HTTPError(403, reason="a page of another origin asks")
        opened = headers.get("Sec-Fetch-Mode") == "navigate" and headers.get("Sec-Fetch-Dest") == "document"
        if headers.get("Sec-Fetch-Site", "none") not in {"none", "same-origin"} and not (
            opened and isinstance(self, PageHandler)
        ):
            raise tornado.web.HTTPError(403, reason="a page of another site asks")

    def write_error(self, status_code: int, **_: Any) -> None:
        """Answer with one line."""
        self.set_header("Content-Type", "application/json; charset=utf-8")
        self.finish(json.dumps({"error": self._reason}))

    def log_exception(self, *_: Any) -> None:
        """Log nothing about a bad request: any client can make one."""


class PageHandler(ReadOnly):
    """The page."""

    def get(self) -> None:
        """Return the page, whose script and style alone may run."""
        text, policy = page()
        self.set_header("Content-Security-Policy", policy)
        self.set_header("Content-Type", "text/html; charset=utf-8")
        self.finish(text)

    head = get


class AnswerHandler(ReadOnly):
    """An answer in JSON, made in a thread: files on a shared file system may be slow."""

    def initialize(
        self,
        names: frozenset[str],
        answer: Callable[[Query], dict[str, Any]] | None = None,
        threads: ThreadPoolExecutor | None = None,
        waiting: threading.Semaphore | None = None,
    ) -> None:
        """Take the names of this machine, what answers, and the threads to do it in."""
        super().initialize(names)
        assert answer is not None
        assert threads is not None
        assert waiting is not None
        self.answer, self.threads, self.waiting = answer, threads, waiting

    async def get(self) -> None:
        """Return the answer, or one line that says why there is none."""
        query = self._query()
        if not self.waiting.acquire(blocking=False):
            raise tornado.web.HTTPError(503, reason="too many requests at once")
        try:
            found = await asyncio.get_running_loop().run_in_executor(self.threads, self.answer, query)
        except InputError as error:
            self._refuse(404, str(error))
            return
        except OSError as error:
            self._refuse(500, f"cannot be read: {error.strerror or type(error).__name__}")
            return
        except Exception as error:  # noqa: BLE001  (one bad file must not end the page)
            self._refuse(500, f"cannot be read: {type(error).__name__}")
            return
        finally:
            self.waiting.release()
        self.set_header("Content-Type", "application/json; charset=utf-8")
        self.finish(_json(found))

    def _refuse(self, status: int, why: str) -> None:
        self.set_status(status)
        self.set_header("Content-Type", "application/json; charset=utf-8")
        self.finish(_json({"error": why}))

    def _query(self) -> Query:
        found = self.request.query_arguments
        if len(found) > MAX_PARAMETERS:
            raise tornado.web.HTTPError(400, reason="too many parameters")
        return {key: values[-1].decode("utf-8", "replace") for key, values in found.items()}


class NothingHere(ReadOnly):
    """Any other path."""

    def get(self) -> None:
        """Refuse."""
        raise tornado.web.HTTPError(404, reason="there is nothing here")

    head = get


def _json(value: Any) -> bytes:
    """Return plain data as JSON; a number that JSON does not have becomes null, a lone surrogate its escape."""
    return json.dumps(_written(value), ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()


def _written(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _written(item) for key, item in value.items()}
    return [_written(item) for item in value] if isinstance(value, (list, tuple)) else value


def application(answers: Answers, host: str, threads: ThreadPoolExecutor) -> tornado.web.Application:
    """Return what answers requests: the page at `/`, and its answers below `/api/`."""
    names = allowed_hosts(host)
    waiting = threading.Semaphore(MAX_WAITING)
    questions = {
        "runs": answers.runs,
        "state": answers.state,
        "series": answers.series,
        "points": answers.points,
        "map": answers.map,
        "ranks": answers.ranks,
        "modules": answers.modules,
    }
    routes: list[Any] = [("/", PageHandler, {"names": names})]
    for name, answer in questions.items():
        settings = {"names": names, "answer": answer, "threads": threads, "waiting": waiting}
        routes.append((f"/api/{name}", AnswerHandler, settings))
    return tornado.web.Application(
        routes,
        compress_response=True,
        default_handler_class=NothingHere,
        default_handler_args={"names": names},
        log_function=lambda _: None,
    )


async def serve(
    answers: Answers, host: str, port: int, started: Callable[[str, int], None], until: "asyncio.Event | None" = None
) -> None:
    """Serve until `until` is set, or for good; call `started` with the address and the port, once it is bound.

    Raises:
        OSError: when the address or the port cannot be bound.

    """
    sockets = tornado.netutil.bind_sockets(port, host)
    with ThreadPoolExecutor(THREADS, "trainsentry serve") as threads:
        server = tornado.httpserver.HTTPServer(
            application(answers, host, threads),
            max_header_size=MAX_HEADER_BYTES,
            max_body_size=0,
            max_buffer_size=MAX_HEADER_BYTES,
            idle_connection_timeout=IDLE_SECONDS,
        )
        server.add_sockets(sockets)
        started(host, sockets[0].getsockname()[1])
        try:
            await (until or asyncio.Event()).wait()
        finally:
            server.stop()
            with contextlib.suppress(Exception):
                await server.close_all_connections()


def polite() -> None:
    """Let the training go first on this machine."""
    if hasattr(os, "nice"):
        os.nice(10)
