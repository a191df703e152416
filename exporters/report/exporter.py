"""The report as an exporter: a run that ended with an incident has its report written by a process of its own."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from trainsentry.exporters.exporter import ExporterEntry, ExportPlace

SWITCH: Final = "TRAINSENTRY_REPORT"
"""Environment variable; 0 leaves the report out."""


def report_of(_: Any, place: ExportPlace) -> Callable[[int], None]:
    """Return the function that starts the report; nobody waits for it.

    `report.html` belongs to the run that has the directory for itself, so a run beside another one writes none.
    """

    def begin(incidents: int) -> None:
        if place.beside or not incidents or os.environ.get(SWITCH) == "0":
            return
        with contextlib.suppress(OSError):  # the run is over, and its records are written
            subprocess.Popen(
                [sys.executable, "-m", __name__, str(place.output_dir)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    return begin


REPORT = ExporterEntry(
    "report", report_of, on=True, at="end", meaning="Write `report.html` when a run ends that had an incident."
)


def main() -> None:
    """Write the report of the run in the given directory."""
    from trainsentry.exporters.report.page import write_report

    write_report(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
