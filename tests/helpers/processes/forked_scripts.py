"""Runs scripts in processes of their own, forked by one that has imported what they import: several seconds, once."""

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

_PARENT = """
import gc, json, os, signal, socket, sys
import torch._dynamo, trainsentry.collectors.torch.watch, trainsentry.monitor.trainer.wiring
import trainsentry.collectors.torch.calls.debugging, trainsentry.monitor.cli.app, trainsentry.monitor.train_monitor

_asked = socket.socket(fileno=int(sys.argv[1]))
_told = {}


def _reap(*_):
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            with os.fdopen(_told.pop(ended[0]), "w") as told:
                told.write(str(os.waitstatus_to_exitcode(ended[1])))
    except (ChildProcessError, BrokenPipeError):
        pass


signal.signal(signal.SIGCHLD, _reap)
gc.collect()
gc.freeze()
while True:
    _text, _fds, _, _ = socket.recv_fds(_asked, 2**20, 4)
    if not _text:
        os._exit(0)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    _child = os.fork()
    if _child == 0:
        break
    _told[_child] = _fds.pop()
    _asked.send(str(_child).encode())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    for _fd in _fds:
        os.close(_fd)
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
os.setpgid(0, 0)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
_asked.close()
for _fd in _told.values():
    os.close(_fd)
for _number, _fd in enumerate(_fds[:3]):
    os.dup2(_fd, _number)
for _fd in _fds:
    os.close(_fd)
_script = json.loads(_text)
os.environ.clear()
os.environ.update(_script["environment"])
os.chdir(_script["folder"])
sys.argv = ["-c", *_script["arguments"]]
sys.path[:0] = [_path for _path in _script["path"] if _path not in sys.path]
exec(_script["code"])  # in __main__; the interpreter then ends as after `python -c`
"""


@dataclass
class Script:
    """A script as for `python -c`, its arguments, and the folder that it runs in."""

    code: str
    arguments: list = field(default_factory=list)
    folder: Path = Path("/")


@dataclass
class Ended:
    """How a script ended, and what it said."""

    returncode: int
    stdout: str
    stderr: str


class RunningScript:
    """A script that runs, with what tests ask of a `subprocess.Popen`."""

    def __init__(self, pid, ends, status):
        self.pid = pid
        self.stdin, self.stdout, self.stderr = ends
        self.returncode = None
        self._status = status

    def is_running(self):
        return self.returncode is None and not select.select([self._status], [], [], 0)[0]

    def wait(self, timeout=120):
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise TimeoutError(f"after {timeout} s the script has not ended")
            with os.fdopen(self._status) as told:
                self.returncode = int(told.read())
        return self.returncode

    def communicate(self, text="", timeout=120):
        """Give it a text, wait until it and all that it started have ended, and return what they said."""
        with contextlib.suppress(BrokenPipeError):
            self.stdin.write(text)
            self.stdin.close()
        with ThreadPoolExecutor(2) as reading:
            said = [reading.submit(end.read) for end in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
                return tuple(each.result(timeout) for each in said)
            except TimeoutError as error:
                self.kill()
                raise subprocess.TimeoutExpired("script", timeout) from error

    def send_signal(self, number):
        """Send a signal to it, unless it has ended."""
        if self.is_running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def __del__(self):
        self.kill()  # whatever a test that failed has left


_parents = []


def _fail():
    _parent.cache_clear()  # the next script has another one
    raise RuntimeError(f"the process that forks scripts has ended: {_parents[-1].stderr.read().decode()[-3000:]}")


@functools.cache
def _parent():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-c", _PARENT, str(theirs.fileno())]
        # Pipes, as scripts have later: Python remembers whether its standard streams are files.
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd="/", **pipes)
        _parents.append(process)

    def end():
        ours.close()
        process.wait(20)

    atexit.register(end)
    return ours


def start_forked(script, path=(), environment=os.environ):
    """Start a script with pipes; `path` is for its imports."""
    asked = {
        "code": script.code,
        "arguments": [str(argument) for argument in script.arguments],
        "folder": str(script.folder),
        "environment": dict(environment),
        "path": [str(folder) for folder in path],
    }
    (theirs_in, ours_in), (ours_out, theirs_out), (ours_err, theirs_err) = (os.pipe() for _ in range(3))
    status, tells = os.pipe()
    theirs = [theirs_in, theirs_out, theirs_err, tells]
    parent = _parent()
    socket.send_fds(parent, [json.dumps(asked).encode()], theirs)
    pid = int(parent.recv(64) or _fail())
    for descriptor in theirs:
        os.close(descriptor)
    return RunningScript(pid, (os.fdopen(ours_in, "w"), os.fdopen(ours_out), os.fdopen(ours_err)), status)


def run_forked(scripts):
    """Run scripts by name, one after the other; return how each ended."""
    ended = {}
    for name, script in scripts.items():
        running = start_forked(script)
        said = running.communicate()
        ended[name] = Ended(running.returncode, *said)
    return ended
