"""Starts a recorder process: `python -m trainsentry.monitor.recorder`, with its `Hello` on standard input."""

import os
import signal
import socket
import sys

from trainsentry.monitor.recorder.hello import Hello
from trainsentry.monitor.recorder.serve import Recorder
from trainsentry.monitor.ring import Ring


def main() -> None:
    """Serve until the trainer closes or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer; what it had recorded is kept
    if hasattr(os, "nice"):
        os.nice(10)
    hello = Hello.decode(sys.stdin.buffer.read())
    ring_descriptor, socket_descriptor = hello.descriptors
    ring = Ring(ring_descriptor, hello.ring_size)
    channel = socket.socket(fileno=socket_descriptor)
    Recorder(hello, ring, channel).serve()
    sys.stdout.flush()
    os._exit(0)  # a writer that hangs must not keep the process alive


if __name__ == "__main__":
    main()
