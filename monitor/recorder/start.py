"""Starts a recorder as a process, or as a thread where no process can be started."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

from trainsentry.monitor.recorder.recorder_settings import RecorderSettings
from trainsentry.monitor.recorder.ring import Ring

_RESTRICTIONS: Final = {
    "CUDA_VISIBLE_DEVICES": "",
    "ASCEND_RT_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
    "PYTHONWARNINGS": "ignore",
}
"""Environment of the recorder: no device, one thread for arithmetic, and few heaps, as with one heap per writer thread
its memory would keep growing."""

TERMINAL_SIGNALS: Final = [getattr(signal, name) for name in ("SIGINT", "SIGHUP") if hasattr(signal, name)]
"""Signals that a terminal sends to all its processes; the recorder ignores them, the trainer handles them."""

KILL_SECONDS: Final = 5.0
"""Seconds to wait for a killed process; only one blocked on a device or a file server takes longer."""


class Running(Protocol):
    """A started recorder."""

    mode: str

    def join(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for its end; return whether it has ended."""

    def kill(self) -> bool:
        """Kill it where possible; return whether it has ended."""


class ProcessRecorder:
    """A recorder in its own process."""

    mode = "process"

    def __init__(self, settings: RecorderSettings, ring: Ring, channel: socket.socket) -> None:
        descriptors = (ring.descriptor, channel.fileno())
        complete = replace(settings, descriptors=descriptors, parent=os.getpid())
        with tempfile.TemporaryFile() as sent:
            sent.write(complete.encode())
            sent.seek(0)
            started: list[subprocess.Popen[bytes]] = []
            try:
                with _terminal_signals_blocked():
                    self.process = subprocess.Popen(
                        [sys.executable, "-m", "trainsentry.monitor.recorder"],
                        stdin=sent,
                        pass_fds=descriptors
                        if settings.position is None
                        else (*descriptors, settings.position.descriptor),
                        env=_environment(),
                        cwd="/",
                    )
                    started.append(self.process)
            except KeyboardInterrupt:  # delivered on unblocking: nobody will own this process
                for process in started:
                    process.kill()
                    process.wait()
                raise

    def join(self, timeout: float) -> bool:
        """Wait for the process to end."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> bool:
        """Kill the process and reap it; give up after KILL_SECONDS if a file system blocks it."""
        self.process.kill()
        return self.join(KILL_SECONDS)


@contextlib.contextmanager
def _terminal_signals_blocked() -> Iterator[None]:
    """Block a terminal's signals while a process is started.

    The process inherits the blocked signals, so Ctrl-C cannot end a recorder before it ignores the signal. The starting
    thread gets its pending signals afterwards.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, TERMINAL_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class NoThread(RuntimeError):
    """Neither a process nor a thread could be started for the recorder."""


class ThreadRecorder:
    """A recorder in a thread of the training process."""

    mode = "thread"

    def __init__(self, settings: RecorderSettings, ring: Ring, channel: socket.socket) -> None:
        from trainsentry.monitor.recorder.loop import Recorder

        own_ring = Ring(os.dup(ring.descriptor), ring.size)
        own_channel = socket.socket(fileno=os.dup(channel.fileno()))
        if settings.position is not None:
            settings = replace(
                settings, position=replace(settings.position, descriptor=os.dup(settings.position.descriptor))
            )

        def work() -> None:
            try:
                Recorder(settings, own_ring, own_channel).serve()
            finally:
                own_channel.close()
                own_ring.close()

        self.thread = threading.Thread(target=work, name="trainsentry-recorder", daemon=True)
        try:
            self.thread.start()
        except RuntimeError as error:
            own_channel.close()
            own_ring.close()
            raise NoThread(f"no process and no thread can be started: {error}") from None

    def join(self, timeout: float) -> bool:
        """Wait for the thread to end."""
        self.thread.join(timeout)
        return not self.thread.is_alive()

    def kill(self) -> bool:
        """Do nothing: a thread cannot be killed; it ends when its socket closes."""
        return not self.thread.is_alive()


def is_stopped(running: Running) -> bool:
    """Whether a signal has stopped the recorder's process, which then waits until somebody continues it."""
    process = getattr(running, "process", None)
    if process is None:
        return False
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
    except OSError:  # only Linux has it
        return False
    return fields.split()[0] in {"T", "t"}


Starter = Callable[[RecorderSettings, Ring, socket.socket], Running]


def start_recorder(settings: RecorderSettings, ring: Ring, channel: socket.socket) -> Running:
    """Start a recorder in a process, or in a thread where that fails."""
    try:
        return ProcessRecorder(settings, ring, channel)
    except (OSError, ValueError, TypeError):  # no fork, no executable, no descriptors to pass on
        return ThreadRecorder(settings, ring, channel)


def _environment() -> dict[str, str]:
    """Return the recorder's environment; it must import the same trainsentry as the trainer."""
    home = Path(sys.modules["trainsentry"].__file__ or "").absolute().parents[1]
    inherited = [str(Path(p).resolve()) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    path = os.pathsep.join([str(home), *inherited])
    return {**os.environ, **_RESTRICTIONS, "PYTHONPATH": path}
