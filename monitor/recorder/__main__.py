"""Starts a recorder process: `python -m trainsentry.monitor.recorder`, with `RecorderSettings` on standard input."""

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
    """Serve until the trainer closes or is gone."""
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
    os._exit(0)  # a writer that hangs must not keep the process alive


def _step_aside() -> None:
    """Leave Ctrl-C and a closed terminal to the trainer, and take the processor only when it has time.

    A process group of its own, and not a session: Linux schedules each session as one group, inside which alone
    `nice` counts. `benchmarks/niced_neighbour.py` shows what that does to a step of torch's busy threads. Batch
    scheduling keeps the recorder from running in the trainer's place at the moment it is woken by it.
    """
    for number in TERMINAL_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, TERMINAL_SIGNALS)  # blocked since before the process began
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)
    if hasattr(os, "nice"):
        os.nice(10)
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


if __name__ == "__main__":
    main()
