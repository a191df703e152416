"""Metrics beside the recording: an endpoint of the node, or a file that is renewed. It runs in a sink of its own."""

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from trainsentry.monitor.recorder.sinks.gaps import Gaps
from trainsentry.monitor.recorder.sinks.writer_thread import WriterThread

RENEW_SECONDS: Final = 10.0
"""Seconds between two writings of the textfile; the node exporter reads it a few times a minute."""


TAKE_OVER_SECONDS: Final = 30.0
"""Seconds between two looks whether the rank that serves the port is still there: two scrapes are lost at most."""


class Metrics:
    """Serves or writes the metrics of a run, as its configuration says; the `first` rank writes the file."""

    def __init__(self, settings: Mapping[str, Any], root: Path, *, first: bool) -> None:
        self.settings = settings
        self.root = root
        self._textfile = Path(settings["textfile"]) if settings.get("textfile") and first else None
        self._written = self._looked = 0.0
        self._serves = settings.get("port") is None

    def begin(self) -> None:
        """Serve the metrics, unless another rank of this run does so on this node; `renew` takes over when that ends.

        Raises:
            OSError: when something else has the port.

        """
        if not self._serves:
            from trainsentry.exporters.prometheus import serve

            self._looked = time.monotonic()
            self._serves = serve(self.root, self.settings["port"], self.settings["address"])

    def renew(self, *, now: bool = False) -> None:
        """Take over a port whose rank has ended, and write the textfile, each if it is time."""
        if not self._serves and time.monotonic() - self._looked >= TAKE_OVER_SECONDS:
            with contextlib.suppress(OSError):  # busy, or another's: looked at again later
                self.begin()
        if self._textfile is None or (not now and time.monotonic() - self._written < RENEW_SECONDS):
            return
        from trainsentry.exporters.prometheus import write_textfile

        self._written = time.monotonic()
        write_textfile(self.root, self._textfile)


class MetricsSink:
    """The metrics in a sink of their own, at which one renewal waits at most: each shows how things stand by then."""

    def __init__(self, metrics: Metrics, gaps: Gaps, max_wait: float, step: int) -> None:
        self.metrics = metrics
        self.sink = WriterThread("prometheus", gaps, max_wait, kept_bytes=1)
        self.sink.submit(metrics.begin, max(step, 0))

    def renew(self, step: int, *, now: bool) -> None:
        """Have them renewed; where that cannot be done, the step is missing from them."""
        self.sink.settle()
        if self.sink.trouble or not self.sink.is_busy:
            self.sink.submit(lambda: self.metrics.renew(now=now), max(step, 0))
            self.sink.settle()
