"""The report of a run that ended with an incident, written by a process of its own that nobody waits for."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

SWITCH: Final = "TRAINSENTRY_REPORT"
"""Environment variable; 0 leaves the report out."""


def begin_report(session: Any) -> None:
    """Start writing the report, if this recorder has incidents to report and the configuration asks for it.

    The report of a directory is of the run that has it for itself.
    """
    if session.hello.beside or not session.hello.report or not session.is_root or not session.incidents.incidents:
        return
    if os.environ.get(SWITCH) == "0":
        return
    with contextlib.suppress(OSError):  # the run is over, and all that was recorded is written
        subprocess.Popen(
            [sys.executable, "-m", __name__, session.hello.output_dir],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


def main() -> None:
    """Write the report of the run in the directory that is given."""
    from trainsentry.exporters.report.page import write_report

    write_report(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
