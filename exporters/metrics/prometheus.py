"""The Prometheus exporter: its settings, the endpoint that one rank of a node serves, and the textfile."""

import contextlib
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trainsentry.exporters.exporter import ExporterEntry, ExportPlace, Needed, setting

RENEW_SECONDS: Final = 10.0
"""Seconds between two writes of the textfile; the node exporter reads it a few times a minute."""

TAKE_OVER_SECONDS: Final = 30.0
"""Seconds between two checks that some rank still serves the port: Prometheus misses two scrapes at most."""

LONGEST_NAME: Final = 200
"""Characters of a run in a file's name; file systems allow 255 bytes."""


@dataclass(frozen=True)
class Prometheus:
    """Metrics for Prometheus: an endpoint of the host, or a text file."""

    port: int | None = setting(
        9464, "Port of the endpoint. The first rank of a host that gets it serves all ranks.", ge=1, le=65535
    )
    address: str = setting("127.0.0.1", "Address of the endpoint.")
    textfile: str | None = setting(
        None, "File for the node exporter, also without a port; in a folder each run has a file of its own."
    )
    run: str | None = setting(None, "Label `run` of every metric; the output directory's path by default.")


class Metrics:
    """Serves or writes the metrics of the run in `root`.

    Only the `first` rank writes the textfile while the run goes on. At the end every rank that finds the file does,
    so that it says how the last of them ended.
    """

    def __init__(self, settings: Prometheus, root: Path, *, first: bool) -> None:
        self.settings = settings
        self.root = root
        self._textfile = textfile_of(settings, root)
        self._first = first
        self._written = self._checked = 0.0
        self._serves = settings.port is None

    def begin(self) -> None:
        """Serve the metrics, unless another rank of this run and node does; `renew` takes over when that one ends.

        Raises:
            OSError: when another program has the port.

        """
        if not self._serves and self.settings.port is not None:
            from trainsentry.exporters.metrics.prometheus_families import serve

            self._checked = time.monotonic()
            self._serves = serve(self.root, self.settings.port, self.settings.address, self.settings.run)

    def renew(self, *, now: bool = False) -> None:
        """Take over the port of a rank that has ended, and write the textfile, each if it is time."""
        if not self._serves and time.monotonic() - self._checked >= TAKE_OVER_SECONDS:
            with contextlib.suppress(OSError):  # the port is busy: the next check tries again
                self.begin()
        if self._textfile is None or (not now and time.monotonic() - self._written < RENEW_SECONDS):
            return
        if not self._first and not (now and self._textfile.exists()):
            return
        from trainsentry.exporters.metrics.prometheus_families import write_textfile

        self._written = time.monotonic()
        write_textfile(self.root, self._textfile, self.settings.run, ending=now)


def textfile_of(settings: Prometheus, root: Path) -> Path | None:
    """Return the textfile of the run in `root`: in a folder (a name that ends in `/`) one named for the run.

    >>> str(textfile_of(Prometheus(textfile="/var/lib/node/", run="gpt 7"), Path("out")))
    '/var/lib/node/trainsentry_gpt_7.prom'
    """
    if settings.textfile is None:
        return None
    path = Path(settings.textfile)
    if not settings.textfile.endswith("/") and not path.is_dir():
        return path
    name = settings.run or str(root.absolute()).strip("/")
    return path / f"trainsentry_{re.sub(r'[^A-Za-z0-9.-]', '_', name)[-LONGEST_NAME:]}.prom"


def metrics_of(block: Prometheus, place: ExportPlace) -> Metrics:
    """Return the metrics of the run that this rank serves or writes."""
    return Metrics(block, place.output_dir, first=place.rank == 0)


PROMETHEUS = ExporterEntry(
    "prometheus",
    metrics_of,
    Prometheus,
    at="status",
    needs=(Needed("prometheus_client", "needs prometheus-client; allowed: pip install 'trainsentry[prometheus]'"),),
)
