"""The cost of a debugger's dump step on a device, beside msprobe's: `measure_dumps`, or run as a worker of it.

msprobe patches torch for the whole process, so each of its figures comes from a process of its own; ours come from one.
Every process times bare steps before its first debugger, and is compared with those.
"""

import contextlib
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))

from device_trainings import GPT, SmallTraining, trainings
from device_work import seconds_of, synchronize

from trainsentry.monitor.demo.model import GptConfig

BOTH = [(task, level) for task in ("statistics", "tensor") for level in ("L0", "L1", "mix")]
OURS_ALONE = [("overflow_check", level) for level in ("L0", "L1", "mix")]
"""msprobe 26 has no overflow_check for torch; ours stands beside its statistics of the same level."""

STEPS = 4
LONGEST = 120
"""Seconds after which a process is ended."""

OURS, PEER = "ours", "msprobe"


@dataclass(frozen=True)
class Dump:
    """Milliseconds that a dump adds to a step, those of the bare step, and the tensors written; or what went wrong."""

    added: float = float("nan")
    bare: float = float("nan")
    tensors: float = 0.0
    trouble: str = ""


def measure_dumps(device: torch.device, end: float, *, peer: bool, tiny: bool) -> dict[tuple[str, str, str], Dump]:
    """Return the dumps by (subject, task, level), until `end` on time.monotonic's clock."""
    files_last = sorted(BOTH + OURS_ALONE, key=lambda mode: mode[0] == "tensor")  # what is written slows what follows
    found = _run(OURS, files_last, device, tiny=tiny)
    for task, level in BOTH if peer else []:
        if time.monotonic() > end:
            found[PEER, task, level] = Dump(trouble="not measured: out of time")
        else:
            found |= _run(PEER, [(task, level)], device, tiny=tiny)
    return found


def _run(
    subject: str, modes: list[tuple[str, str]], device: torch.device, *, tiny: bool
) -> dict[tuple[str, str, str], Dump]:
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        wanted = json.dumps({"subject": subject, "modes": modes, "device": str(device), "tiny": tiny})
        command = [sys.executable, __file__, wanted, file.name]
        try:
            done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LONGEST)
            trouble = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        except subprocess.TimeoutExpired:
            trouble = f"no end within {LONGEST} s"
        lines = [json.loads(line) for line in file]
    found = {(subject, line.pop("task"), line.pop("level")): Dump(**line) for line in lines}
    return {(subject, *mode): found.get((subject, *mode), Dump(trouble=trouble)) for mode in modes}


def worker(subject: str, modes: list[tuple[str, str]], device: torch.device, result: Path, *, tiny: bool) -> None:
    """Time each mode, and write a line of JSON for it at once: the next one may end the process."""
    training = trainings(device, tiny=True)[GPT]() if tiny else SmallTraining(GptConfig(), device)
    for _ in range(3):
        training.step()
    bare = 1e3 * statistics.median(seconds_of(training.step, device) for _ in range(5))
    for task, level in modes:
        line: dict[str, Any] = {"task": task, "level": level}
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                milliseconds, tensors = _dumped(subject, task, level, training, device)
            line |= {"added": milliseconds - bare, "bare": bare, "tensors": tensors}
        except Exception as error:  # noqa: BLE001 - a task that a device has not is a result
            line["trouble"] = f"{type(error).__name__}: {error}"[:200]
        with result.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _dumped(subject: str, task: str, level: str, training: Any, device: torch.device) -> tuple[float, float]:
    """Return the milliseconds of a dump step, and the tensors that it writes; both debuggers have their defaults."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = {"task": task, "dump_path": str(folder / "dump"), "rank": [], "step": [], "level": level}
        of_task = {"overflow_nums": -1} if task == "overflow_check" else {"scope": [], "list": [], "data_mode": ["all"]}
        (folder / "config.json").write_text(json.dumps({**config, task: of_task}))
        if subject == OURS:
            from trainsentry import PrecisionDebugger
        else:
            from msprobe.pytorch import PrecisionDebugger
        debugger = PrecisionDebugger(config_path=str(folder / "config.json"))
        times = []
        for _ in range(STEPS):
            began = time.perf_counter()
            debugger.start(model=training.model)
            training.step()
            debugger.stop()
            debugger.step()
            synchronize(device)
            times.append(1e3 * (time.perf_counter() - began))
        if subject == OURS:
            debugger.close()
        tensors = sum(path.suffix == ".pt" for path in folder.rglob("*")) / STEPS
    return statistics.median(times[1:]), tensors


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    pairs = [(task, level) for task, level in asked["modes"]]
    worker(asked["subject"], pairs, torch.device(asked["device"]), Path(sys.argv[2]), tiny=asked["tiny"])
