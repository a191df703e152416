"""The HTTP endpoint of the metrics, within bounds: it takes descriptors and threads of the recorder that serves it."""

import contextlib
import socket
import threading
from http.server import ThreadingHTTPServer
from typing import Any, Final

from prometheus_client import CollectorRegistry, MetricsHandler

MAX_CONNECTIONS: Final = 16
"""Connections at once; there are as many scrapers as Prometheus servers, one or two."""

REQUEST_SECONDS: Final = 5.0
"""How long a connection may say nothing."""


class MetricsServer(ThreadingHTTPServer):
    """Answers each connection in a thread of its own; when there are too many, the one that is oldest is cut off."""

    daemon_threads = True

    def __init__(self, address: str, port: int, registry: CollectorRegistry) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._open: dict[int, Any] = {}
        self._opening = threading.Lock()
        handler = type("Handler", (MetricsHandler.factory(registry),), {"timeout": REQUEST_SECONDS})
        super().__init__((address, port), handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection, after the oldest of too many is cut off."""
        with self._opening:
            if len(self._open) >= MAX_CONNECTIONS:
                with contextlib.suppress(OSError):
                    self._open.pop(next(iter(self._open))).shutdown(socket.SHUT_RDWR)  # its thread ends
            self._open[id(request)] = request
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection that has been answered."""
        with self._opening:
            self._open.pop(id(request), None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a connection that was broken off: whoever calls can do that."""


def start_http_server(port: int, address: str, registry: CollectorRegistry) -> tuple[MetricsServer, threading.Thread]:
    """Serve the metrics in a thread.

    Raises:
        OSError: when the port cannot be had.

    """
    server = MetricsServer(address, port, registry)
    thread = threading.Thread(target=server.serve_forever, name="trainsentry metrics", daemon=True)
    thread.start()
    return server, thread
