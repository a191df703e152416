"""The cost of a watched step on a device, beside msprobe's two generations: all arms in one process, alternating."""

import contextlib
import io
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))

from device_trainings import Training
from device_work import forbidden_to_wait, free_memory, peak_memory, seconds_of, work_of
from subjects import Subject, make_subject

DEFAULT, SAME_STEP = "default configuration", "default with same_step"
OF_OURS = (DEFAULT, SAME_STEP)
"""Workloads that sample every tenth step; msprobe has none like them."""

WORKLOADS = (*OF_OURS, "gradients", "weights", "optimizer state", "activations", "all")
OURS, V1, V2 = "trainsentry", "msprobe_v1", "msprobe_v2"
ROUNDS = 4
WARM_UP = 3
LEAST_STEPS = 5
"""Steps of a block without msprobe: the wait at its end shows host time that the device hides in a training."""


@dataclass
class Arm:
    """A training with its monitor, the memory that it took to begin, and the seconds of a step in each round."""

    training: Training
    subject: Subject | None
    peak: float | None = None
    seconds: list[float] = field(default_factory=list)

    def steps(self, count: int) -> None:
        """Train; a monitor's output is not shown."""
        with contextlib.redirect_stdout(io.StringIO()):
            for _ in range(count):
                self.training.step()
                if self.subject is not None:
                    self.subject.step()

    def settle(self) -> None:
        """Finish the monitor's deferred work."""
        if self.subject is not None:
            self.subject.settle()


@dataclass(frozen=True)
class Cell:
    """A model under a workload: the bare step's seconds; by monitor the ratios and the memory added."""

    bare: float
    ratios: dict[str, list[float]]
    memory: dict[str, float]
    troubles: dict[str, str]

    def ratio(self, name: str) -> float | None:
        """Return the median ratio to the bare step."""
        return statistics.median(self.ratios[name]) if self.ratios.get(name) else None


def measure(
    make: Callable[[], Training], workload: str, names: list[str], seconds: float, device: torch.device
) -> Cell:
    """Measure a cell in about `seconds`; a monitor that fails is left out, with its error."""
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as directory:
        arms, troubles = _arms(make, workload, names, Path(directory), device)
        _rounds(arms, end, 10 if workload in OF_OURS else 1, device)
        cell = _cell(arms, troubles)
        _close(arms, device)
    return cell


def launches_added(make: Callable[[], Training], workload: str, device: torch.device) -> int | None:
    """Return the kernels that our monitor adds to a step, the mean of those between two samples; None if unknown."""
    times = 10 if workload in OF_OURS else 1
    with tempfile.TemporaryDirectory() as directory:
        arms, _ = _arms(make, workload, ["none", OURS], Path(directory), device)
        work = [work_of(lambda arm=arm: arm.steps(1), device, times) for arm in arms.values()]
        _close(arms, device)
    bare, watched = work
    return None if bare is None or watched is None else watched.launches - bare.launches


def _close(arms: dict[str, Arm], device: torch.device) -> None:
    for arm in arms.values():
        if arm.subject is not None:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                arm.subject.close()
    arms.clear()
    free_memory(device)


def _arms(
    make: Callable[[], Training], workload: str, names: list[str], directory: Path, device: torch.device
) -> tuple[dict[str, Arm], dict[str, str]]:
    """Make and warm up the arms that work."""
    arms: dict[str, Arm] = {}
    troubles: dict[str, str] = {}
    for name in names:

        def begin(name: str = name) -> None:
            training = make()
            with contextlib.redirect_stdout(io.StringIO()):
                subject = make_subject(name, training.model, training.optimizer, directory / name, workload)
            arms[name] = Arm(training, subject)
            arms[name].steps(WARM_UP)
            arms[name].settle()

        try:
            peak = peak_memory(begin, device)
        except Exception as error:
            if name in {"none", OURS}:
                raise
            troubles[name] = f"{type(error).__name__}: {error}"
            arms.pop(name, None)
            free_memory(device)
        else:
            arms[name].peak = peak
    return arms, troubles


def _rounds(arms: dict[str, Arm], end: float, multiple: int, device: torch.device) -> None:
    """Alternate blocks of steps between the arms until the time is up, one round at least."""
    share = max(end - time.monotonic(), 0.0) / ROUNDS / len(arms)
    counts = {}
    for name, arm in arms.items():
        step = seconds_of(lambda arm=arm: arm.steps(1), device)
        arm.settle()
        least = LEAST_STEPS if name in {"none", OURS} else 1
        counts[name] = max(least, min(10, int(share / step))) if multiple == 1 else multiple
    for number in range(ROUNDS):
        began, names = time.monotonic(), list(arms)
        first = number % len(names)
        for name in names[first:] + names[:first]:
            arms[name].seconds.append(seconds_of(lambda n=name: arms[n].steps(counts[n]), device) / counts[name])
            arms[name].settle()
        if 2 * time.monotonic() - began > end:
            return


def _cell(arms: dict[str, Arm], troubles: dict[str, str]) -> Cell:
    bare = arms["none"]
    watched = {name: arm for name, arm in arms.items() if name != "none"}
    return Cell(
        statistics.median(bare.seconds),
        {n: [x / y for x, y in zip(arm.seconds, bare.seconds, strict=True)] for n, arm in watched.items()},
        {n: arm.peak - bare.peak for n, arm in watched.items() if arm.peak is not None and bare.peak is not None},
        troubles,
    )


ALWAYS = {part: {"every": 1} for part in ("gradients", "parameters", "optimizer_state")}
OFF = {"updates": False, "communication": False}
LARGE_ARMS: dict[str, dict[str, Any] | None] = {
    "bare": None,
    "gradients, weights and state at every step": {**OFF, **ALWAYS, "activations": False},
    "and activations at every tenth": {**OFF, **ALWAYS, "activations": {"every": 10}},
}


def measure_large(training: Training, seconds: float, device: torch.device) -> dict[str, list[float]]:
    """Return the seconds of a step of the large training by arm and round, in about `seconds`; one round at least."""
    end = time.monotonic() + seconds
    found: dict[str, list[float]] = {name: [] for name in LARGE_ARMS}
    step = seconds_of(training.step, device)
    step = seconds_of(training.step, device)
    steps = 10 if 3 * 10 * len(LARGE_ARMS) * step < seconds else 5
    for number in range(ROUNDS):
        began, names = time.monotonic(), list(LARGE_ARMS)
        for name in names[number % 3 :] + names[: number % 3]:
            found[name].append(_watched_block(training, LARGE_ARMS[name], steps, device))
        if 2 * time.monotonic() - began > end:
            break
    return found


def _watched_block(training: Training, collect: dict[str, Any] | None, steps: int, device: torch.device) -> float:
    """Return the seconds of a step in a block that a monitor of its own watches, or none."""
    with tempfile.TemporaryDirectory() as directory:
        if collect is None:
            training.step()
            return seconds_of(training.step, device, steps)
        with _monitor(directory, collect).watch(training.model, training.optimizer):
            training.step()
            return seconds_of(training.step, device, steps)


def waits(training: Training, device: torch.device) -> bool | None:
    """Return whether a monitored step waits for the device; None where the device cannot say."""
    collect = {**OFF, **ALWAYS, "activations": {"every": 1}}
    with tempfile.TemporaryDirectory() as directory, _monitor(directory, collect) as monitor:
        monitor.watch(training.model, training.optimizer)
        for _ in range(WARM_UP):
            training.step()
        try:
            with forbidden_to_wait(device) as known:
                for _ in range(3):
                    training.step()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            return True
    return False if known else None


def _monitor(directory: str, collect: dict[str, Any]) -> Any:
    import trainsentry

    return trainsentry.TrainMonitor({"output_dir": directory, "collect": collect, "on_incident": False})
