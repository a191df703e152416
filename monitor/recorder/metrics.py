"""Metrics beside the recording: an endpoint of the node, or a file that is renewed. It runs in a sink of its own."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

RENEW_SECONDS: Final = 10.0
"""Seconds between two writings of the textfile; the node exporter reads it a few times a minute."""


class Metrics:
    """Serves or writes the metrics of a run, as its configuration says; the `first` rank writes the file."""

    def __init__(self, settings: Mapping[str, Any], root: Path, *, first: bool) -> None:
        self.settings = settings
        self.root = root
        self._textfile = Path(settings["textfile"]) if settings.get("textfile") and first else None
        self._written = 0.0

    def begin(self) -> None:
        """Serve the metrics, unless another rank of this run does so on this node.

        Raises:
            OSError: when something else has the port.

        """
        if self.settings.get("port") is not None:
            from trainsentry.exporters.prometheus import serve

            serve(self.root, self.settings["port"], self.settings["address"])

    def renew(self, *, now: bool = False) -> None:
        """Write the textfile, if there is one and it is time."""
        if self._textfile is None or (not now and time.monotonic() - self._written < RENEW_SECONDS):
            return
        from trainsentry.exporters.prometheus import write_textfile

        self._written = time.monotonic()
        write_textfile(self.root, self._textfile)
