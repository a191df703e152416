"""Serves the metrics over HTTP, with limits, as each connection costs the recorder a descriptor and a thread."""

import contextlib
import socket
import threading
from http.server import ThreadingHTTPServer
from typing import Any, Final

from prometheus_client import CollectorRegistry, MetricsHandler

MAX_CONNECTIONS: Final = 16
"""Simultaneous connections; one or two Prometheus servers scrape a run."""

REQUEST_SECONDS: Final = 5.0
"""Seconds that a connection may stay idle."""


class MetricsServer(ThreadingHTTPServer):
    """Answers each connection in its own thread; when there are too many, closes the oldest."""

    daemon_threads = True

    def __init__(self, address: str, port: int, registry: CollectorRegistry) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._open: dict[int, Any] = {}
        self._opening = threading.Lock()
        handler = type("Handler", (MetricsHandler.factory(registry),), {"timeout": REQUEST_SECONDS})
        super().__init__((address, port), handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection; first close the oldest if there are too many."""
        with self._opening:
            if len(self._open) >= MAX_CONNECTIONS:
                with contextlib.suppress(OSError):
                    self._open.pop(next(iter(self._open))).shutdown(socket.SHUT_RDWR)  # its thread ends
            self._open[id(request)] = request
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection after its answer."""
        with self._opening:
            self._open.pop(id(request), None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing about a broken connection: any client can cause one."""


def start_http_server(port: int, address: str, registry: CollectorRegistry) -> tuple[MetricsServer, threading.Thread]:
    """Serve the metrics in a thread.

    Raises:
        OSError: when the port cannot be bound.

    """
    server = MetricsServer(address, port, registry)
    thread = threading.Thread(target=server.serve_forever, name="trainsentry metrics", daemon=True)
    thread.start()
    return server, thread
