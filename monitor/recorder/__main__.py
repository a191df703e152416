"""Runs a recorder process: `python -m trainsentry.monitor.recorder`, with `RecorderSettings` on standard input."""

import contextlib
import os
import signal
import socket
import sys

from trainsentry.monitor.recorder.loop import Recorder
from trainsentry.monitor.recorder.recorder_settings import RecorderSettings
from trainsentry.monitor.recorder.ring import Ring
from trainsentry.monitor.recorder.sinks.events import begin_last_exports
from trainsentry.monitor.recorder.start import TERMINAL_SIGNALS


def main() -> None:
    """Serve the trainer until it closes the session or is gone, then start the report."""
    _step_aside()
    settings = RecorderSettings.decode(sys.stdin.buffer.read())
    ring_descriptor, socket_descriptor = settings.descriptors
    ring = Ring(ring_descriptor, settings.ring_size)
    channel = socket.socket(fileno=socket_descriptor)
    recorder = Recorder(settings, ring, channel)
    recorder.serve()
    session = recorder.session
    if session.is_root:
        begin_last_exports(session.settings, session.directory, session.table, len(session.incidents.incidents))
    sys.stdout.flush()
    os._exit(0)  # a hung writer must not keep the process alive


def _step_aside() -> None:
    """Ignore Ctrl-C and a closed terminal, which the trainer handles, and run only when a processor is idle.

    The recorder gets its own process group but no session: Linux schedules a session as one group, and `nice` counts
    only inside it (`benchmarks/cost/niced_neighbour.py` measures the effect on torch's busy threads). Batch scheduling
    keeps the recorder from preempting the trainer when the trainer wakes it.
    """
    for number in TERMINAL_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, TERMINAL_SIGNALS)  # the parent blocked them before the start
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)
    if hasattr(os, "nice"):
        os.nice(10)
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


if __name__ == "__main__":
    main()
