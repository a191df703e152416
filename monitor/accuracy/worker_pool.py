"""Shares calls among worker processes, and replaces a worker that dies."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import trainsentry
from trainsentry.exporters.files.foreign_files import InputError
from trainsentry.monitor.accuracy.dumped_calls import DumpedCall
from trainsentry.monitor.accuracy.judged_call import JudgedCall, failed
from trainsentry.monitor.accuracy.worker import WorkerSettings, check_call, make_checks

CALL_SECONDS: Final = 600.0
"""Seconds that a call may take, forward and backward on both sides, until its worker counts as hanging."""

_Answer = tuple[int, JudgedCall | Exception]


def check_here(calls: Sequence[DumpedCall], settings: WorkerSettings) -> Iterator[JudgedCall]:
    """Check calls in this process, one after the other.

    Raises:
        InputError: when the device cannot be used.

    """
    try:
        checks = make_checks(settings)
    except (ValueError, ImportError) as error:
        raise InputError(str(error)) from None
    for call in calls:
        yield check_call(checks, _request(call), settings)


def check_shared(
    calls: Sequence[DumpedCall],
    settings: WorkerSettings,
    devices: Sequence[str],
    processes: int,
    seconds: float = CALL_SECONDS,
) -> Iterator[JudgedCall]:
    """Check calls in several processes, which take turns on the devices; yield them in the order of `calls`.

    Raises:
        InputError: when a worker cannot use its device.

    """
    work: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(calls)):
        work.put(index)
    answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
    count = max(1, min(processes, len(calls)))
    workers = [CallWorker(replace(settings, device=devices[i % len(devices)]), seconds) for i in range(count)]
    stopping = threading.Event()
    threads = [
        threading.Thread(target=_serve, args=(worker, calls, work, answers, stopping), daemon=True)
        for worker in workers
    ]
    for thread in threads:
        thread.start()
    try:
        yield from _in_order(len(calls), answers)
    finally:
        stopping.set()
        for worker in workers:
            worker.end()
        for thread in threads:
            thread.join(timeout=5)


def _in_order(count: int, answers: "queue.SimpleQueue[_Answer]") -> Iterator[JudgedCall]:
    waiting: dict[int, JudgedCall] = {}
    for index in range(count):
        while index not in waiting:
            place, answer = answers.get()
            if isinstance(answer, Exception):
                raise answer
            waiting[place] = answer
        yield waiting.pop(index)


def _serve(
    worker: "CallWorker",
    calls: Sequence[DumpedCall],
    work: "queue.SimpleQueue[int]",
    answers: "queue.SimpleQueue[_Answer]",
    stopping: threading.Event,
) -> None:
    while not stopping.is_set():
        try:
            index = work.get_nowait()
        except queue.Empty:
            break
        try:
            answers.put((index, _checked_by(worker, calls[index])))
        except Exception as error:  # noqa: BLE001 - raised again by the thread that collects the answers
            answers.put((index, error))
            break
    worker.end()


def _checked_by(worker: "CallWorker", call: DumpedCall) -> JudgedCall:
    """Have a call checked; the death of the process is the call's failure, as it ran the call on the device."""
    try:
        return worker.check(call)
    except WorkerEndedError as ended:
        return failed(call.name, str(ended))


class WorkerEndedError(Exception):
    """A worker process that ended before it answered; the message says how."""


class CallWorker:
    """A worker process, started when it is needed and again after it died.

    `check` may save the tensors of a failed call in another folder than the settings', or nowhere ("").
    """

    def __init__(self, settings: WorkerSettings, seconds: float) -> None:
        self._settings = settings
        self._seconds = seconds
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._ended = False

    def check(self, call: DumpedCall, errors: str | None = None) -> JudgedCall:
        """Have a call checked.

        Raises:
            WorkerEndedError: when the process ended before it answered.
            InputError: when the device cannot be used.
            OSError: when no process can be started.

        """
        process = self._running()
        line = self._ask(process, json.dumps(_request(call, errors)) + "\n")
        try:
            answer = json.loads(line)
        except ValueError:
            raise WorkerEndedError(self._death(process)) from None
        if "fatal" in answer:
            raise InputError(str(answer["fatal"]))
        return JudgedCall(**answer)

    def end(self) -> None:
        """End the process."""
        with self._lock:
            self._ended = True
            if self._process is not None and self._process.poll() is None:
                self._process.kill()
                self._process.wait()

    def _running(self) -> "subprocess.Popen[str]":
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = _start(self._settings)
                if self._ended:
                    self._process.kill()
            return self._process

    def _ask(self, process: "subprocess.Popen[str]", request: str) -> str:
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(self._seconds, self._give_up, (process,))
        self.timed_out = False
        timer.start()
        try:
            with contextlib.suppress(OSError):
                process.stdin.write(request)
                process.stdin.flush()
                return process.stdout.readline()
            return ""
        finally:
            timer.cancel()

    def _give_up(self, process: "subprocess.Popen[str]") -> None:
        self.timed_out = True
        process.kill()

    def _death(self, process: "subprocess.Popen[str]") -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        process.kill()
        code = process.wait()
        if self.timed_out:
            return f"its process was ended after {self._seconds:g} s without a result"
        return f"its process died ({_end_of(code)})"


def _end_of(code: int) -> str:
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    return f"exit status {code}"


def _request(call: DumpedCall, errors: str | None = None) -> dict[str, Any]:
    request = {"call": call.name, "forward": call.forward, "backward": call.backward}
    return request if errors is None else {**request, "errors": errors}


def _start(settings: WorkerSettings) -> "subprocess.Popen[str]":
    home = str(Path(trainsentry.__file__).resolve().parents[1])
    paths = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-m", "trainsentry.monitor.accuracy.worker", settings.as_argument()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        encoding="utf-8",
    )
