"""Measures subjects in one process: times in alternating blocks, or counts of single steps. See overhead.py."""

import gc
import hashlib
import json
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))

from gpt import PRESETS, Training
from machine import describe_machine
from subjects import make_subject
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def children() -> list[int]:
    """Return the child processes of this one."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        found += [int(pid) for pid in (task / "children").read_text().split()]
    return found


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and its children."""
    ticks = 0
    for pid in children():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def written_bytes() -> int:
    """Return the bytes that this process and its children have passed to write()."""
    total = 0
    for pid in [os.getpid(), *children()]:
        text = Path(f"/proc/{pid}/io").read_text()
        total += int(text.split("wchar:")[1].split()[0])
    return total


def peak_mb() -> float:
    """Return the peak resident memory of this process and its children together, in MB."""
    total = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    for pid in children():
        total += int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
    return total


class Arm:
    """A training run with one subject."""

    def __init__(self, subject: str, preset: str, workload: str, directory: Path) -> None:
        self.training = Training(PRESETS[preset])
        self.subject = make_subject(
            subject, self.training.model, self.training.optimizer, directory / subject, workload
        )
        self.training.monitor = self.subject

    def block(self, steps: int) -> tuple[list[float], float]:
        """Train some steps; return the wall seconds of each, and CPU seconds per step until everything is written."""
        gc.collect()
        cpu = cpu_seconds()
        walls = [self.training.step() for _ in range(steps)]
        if self.subject is not None:
            self.subject.settle()
        return walls, (cpu_seconds() - cpu) / steps


def measure_time(subjects: list[str], preset: str, workload: str, rounds: int, steps: int) -> dict[str, Any]:
    """Return wall and CPU seconds of each subject's blocks, which alternate; their order rotates with the rounds."""
    with tempfile.TemporaryDirectory() as directory:
        names = ["none", *subjects]
        arms = {name: Arm(name, preset, workload, Path(directory)) for name in names}
        for arm in arms.values():
            arm.block(3)
        blocks: dict[str, list[tuple[list[float], float]]] = {name: [] for name in names}
        if workload == "default configuration":
            steps = 10  # a whole cycle of its schedule
        for round_number in range(rounds):
            at = round_number % len(names)
            for name in names[at:] + names[:at]:
                blocks[name].append(arms[name].block(steps))
        for arm in arms.values():
            if arm.subject is not None:
                arm.subject.close()
    return {"blocks": blocks, "machine": describe_machine()}


class OperationCounter(TorchDispatchMode):
    """Counts dispatched operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one operation and the bytes of its arguments and results."""
        result = function(*args, **(kwargs or {}))
        self.operations[function._schema.name] += 1
        if not function.is_view:
            tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
            self.bytes += sum(x.numel() * x.element_size() for x in tensors if not x.is_sparse)
        return result


def count_kernel_bytes() -> list[int]:
    """Patch trainsentry's compiled kernel to append the bytes that it reads to the returned list."""
    read = [0]
    try:
        from trainsentry.collectors.torch.rows import host_statistics, shared_rows, step_rows
    except ImportError:
        return read
    one, many = host_statistics.read_at, host_statistics.read_many_at

    def read_at(address: int, x: torch.Tensor, *args: Any) -> None:
        read[0] += x.numel() * x.element_size()
        one(address, x, *args)

    def read_many_at(addresses: list[int], tensors: list[torch.Tensor], *args: Any) -> None:
        read[0] += sum(x.numel() * x.element_size() for x in tensors)
        many(addresses, tensors, *args)

    step_rows.read_at, step_rows.read_many_at = read_at, read_many_at  # type: ignore[attr-defined]
    # Known tensors are read by compiled functions, so that each is looked at anew while bytes are counted.
    step_rows.read_described_at = lambda *_: False  # type: ignore[attr-defined]
    shared_rows.address_of = lambda _: 0  # type: ignore[attr-defined]
    return read


def bytes_of_kernel(subject: str, preset: str, workload: str, directory: Path) -> int:
    """Return the bytes that trainsentry's compiled kernel reads in the same step of another run."""
    kernel = count_kernel_bytes()
    arm = Arm(subject, preset, workload, directory)
    arm.block(7)
    kernel[0] = 0
    arm.training.step()
    read = kernel[0]
    if arm.subject is not None:
        arm.subject.close()
    return read


def count_calls(training: Training) -> int:
    """Return the Python and C calls of one step."""
    calls = 0

    def note(_frame: Any, event: str, _arg: Any) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    sys.setprofile(note)
    try:
        training.step()
    finally:
        sys.setprofile(None)
    return calls


def measure_counts(subject: str, preset: str, workload: str) -> dict[str, Any]:
    """Return the counts of one step of a subject: operations, host reads, calls, bytes; and a digest of the weights."""
    with tempfile.TemporaryDirectory() as directory:
        arm = Arm(subject, preset, workload, Path(directory))
        arm.block(3)
        written = written_bytes()
        arm.block(4)
        written = (written_bytes() - written) // 4
        memory = peak_mb()
        with OperationCounter() as counter:
            arm.training.step()
        calls = count_calls(arm.training)
        if arm.subject is not None:
            arm.subject.close()
        kernel_bytes = bytes_of_kernel(subject, preset, workload, Path(directory) / "bytes")
    weights = b"".join(p.detach().numpy().tobytes() for p in arm.training.model.parameters())
    return {
        "operations": sum(counter.operations.values()),
        "host_reads": counter.operations["aten::_local_scalar_dense"],
        "calls": calls,
        "bytes_read": counter.bytes + kernel_bytes,
        "bytes_written": written,
        "peak_mb": memory,
        "losses": arm.training.losses,
        "weights": hashlib.sha256(weights).hexdigest(),
    }


def main() -> None:
    """Run the measurement given as JSON in the first argument; print the result as the last line."""
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(PRESETS[asked["preset"]].threads)
    mode = asked.pop("mode")
    print(json.dumps(measure_time(**asked) if mode == "time" else measure_counts(**asked)))


if __name__ == "__main__":
    main()
