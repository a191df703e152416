"""Recorders that one process forks, which has imported what they import: a third of a second for each of a thousand.

Where a start itself is tested, and in every script that a test runs, recorders start from nothing as they do for users.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace

from trainsentry.monitor.recorder import start

RING, CHANNEL, LISTENING = range(200, 203)
"""Descriptors of a recorder, beyond those that its imports have opened."""

_PARENT = f"""
import gc, json, os, signal, socket, sys
import numpy.ma, trainsentry.exporters.csv.exporter, trainsentry.exporters.report.exporter  # of every recorder, later
from trainsentry.monitor.recorder.__main__ import main

ALIVE = socket.socket(fileno=int(sys.argv[1]))


def reap(*_):
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def become_a_recorder(environment, received):
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for descriptor, number in zip(received, (0, 1, 2, {RING}, {CHANNEL}, {LISTENING})):
        os.dup2(descriptor, number)
        os.close(descriptor)
    ALIVE.close()
    os.environ.clear()
    os.environ.update(environment)
    main()


signal.signal(signal.SIGCHLD, reap)
gc.collect()
gc.freeze()
while True:
    asked, received, _, _ = socket.recv_fds(ALIVE, 2**20, 6)
    if not asked:
        os._exit(0)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        try:
            become_a_recorder(json.loads(asked), received)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(1)
    handle = os.pidfd_open(child)
    socket.send_fds(ALIVE, [str(child).encode()], [handle])
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    for descriptor in (handle, *received):
        os.close(descriptor)
"""


STARTED_FROM_NOTHING = start.ProcessRecorder


class Nursery:
    """The process that forks recorders."""

    def __init__(self):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel, self.lock = ours, threading.Lock()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _PARENT, str(theirs.fileno())],
                pass_fds=[theirs.fileno()], env=start._environment(), cwd="/",
            )  # fmt: skip

    def fork(self, settings, descriptors):
        """Return the number and the handle of a new recorder's process."""
        placed = settings.position and replace(settings.position, descriptor=LISTENING)
        numbered = replace(settings, descriptors=(RING, CHANNEL), parent=self.process.pid, position=placed)
        with tempfile.TemporaryFile() as sent, self.lock:
            sent.write(numbered.encode())
            sent.seek(0)
            asked = json.dumps(start._environment()).encode()
            socket.send_fds(self.channel, [asked], [sent.fileno(), 1, 2, *descriptors])
            number, [handle], _, _ = socket.recv_fds(self.channel, 64, 1)
        return int(number), handle

    def close(self):
        self.channel.close()
        self.process.wait(10)


class ForkedProcess:
    """A process that another one has forked, with what tests ask of a `subprocess.Popen`."""

    def __init__(self, pid, handle):
        self.pid, self._handle = pid, handle
        self.returncode = None

    def __del__(self):
        if self.returncode is None:
            os.close(self._handle)

    def poll(self):
        """Return 0 where it has ended; how is known to its parent alone."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout=None):
        if self.returncode is None:
            poller = select.poll()
            poller.register(self._handle, select.POLLIN)
            if not poller.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired("recorder", timeout)
            os.close(self._handle)
            self.returncode = 0
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            signal.pidfd_send_signal(self._handle, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def forked_recorders():
    """Fork the recorders of this process; where that is not possible, start them as ever."""
    if not hasattr(os, "pidfd_open"):
        yield
        return
    nursery = Nursery()

    class ForkedRecorder(STARTED_FROM_NOTHING):
        """A recorder in a process of its own."""

        def __init__(self, settings, ring, channel):
            listening = [] if settings.position is None else [settings.position.descriptor]
            with start._terminal_signals_blocked():
                number, handle = nursery.fork(settings, [ring.descriptor, channel.fileno(), *listening])
            self.process = ForkedProcess(number, handle)

    start.ProcessRecorder = ForkedRecorder
    try:
        yield
    finally:
        start.ProcessRecorder = STARTED_FROM_NOTHING
        nursery.close()
