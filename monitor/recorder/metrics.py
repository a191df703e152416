"""Metrics beside the recording: an endpoint of the node, or a file that is renewed."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

RENEW_SECONDS: Final = 10.0
"""Seconds between two writings of the textfile; the node exporter reads it a few times a minute."""


class Metrics:
    """Serves or writes the metrics of a run, as its configuration says. `failed` hears of what does not work, once."""

    def __init__(self, settings: Mapping[str, Any], root: Path, failed: Callable[[str], None]) -> None:
        self.root = root
        self._failed = failed
        self._textfile = Path(settings["textfile"]) if settings.get("textfile") else None
        self._written = 0.0
        if settings.get("port") is not None:
            self._attempt(lambda: _serve(root, settings["port"], settings["address"]))

    def renew(self, *, now: bool = False) -> None:
        """Write the textfile, if there is one and it is time."""
        if self._textfile is None or (not now and time.monotonic() - self._written < RENEW_SECONDS):
            return
        self._written = time.monotonic()
        path = self._textfile
        self._attempt(lambda: _write(self.root, path))

    def _attempt(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - metrics are told apart from the recording
            self._textfile = None
            self._failed(f"{type(error).__name__}: {error}")


def _serve(root: Path, port: int, address: str) -> None:
    from trainsentry.exporters.prometheus import serve

    serve(root, port, address)


def _write(root: Path, path: Path) -> None:
    from trainsentry.exporters.prometheus import write_textfile

    write_textfile(root, path)
