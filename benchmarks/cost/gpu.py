"""Measures the monitor's cost on a GPU with a Llama-like model of a billion parameters, and the kernel's bandwidth.

    python benchmarks/cost/gpu.py [--rounds 6] [--steps 10] [--tiny] [--device cuda]

Training: bf16 weights with float32 moments, 32,768 tokens a step, no recomputation. Blocks of steps alternate between
bare training, gradients + weights + optimizer state at every step, and those with all activations at every tenth.
Prints the median, minimum and maximum ratio to the bare block of the same round, kernel launches of a step, and
whether a monitored step passes `torch.cuda.set_sync_debug_mode("error")`.
Bandwidth: bytes that the kernel reads a second, as a share of the bytes that a device copy reads and writes.
`--tiny --device cpu` checks the script itself, in Triton's interpreter when TRITON_INTERPRET=1 is set.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))

from llama import TINY, Llama, Shape, WideMoments
from machine import describe_machine

import trainsentry
from trainsentry.collectors.torch.rows.device_rows import DeviceRows
from trainsentry.collectors.torch.rows.fused_rows import kernels_for

ALWAYS = {part: {"every": 1} for part in ("gradients", "parameters", "optimizer_state")}
OFF = {"updates": False, "communication": False}
ARMS: dict[str, dict[str, Any] | None] = {
    "bare": None,
    "gradients + weights + state": {**OFF, **ALWAYS, "activations": False},
    "+ activations every 10": {**OFF, **ALWAYS, "activations": {"every": 10}},
}


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class Training:
    """The model, its optimizer and one batch."""

    def __init__(self, shape: Shape, device: str) -> None:
        torch.manual_seed(0)
        self.device = device
        with torch.device(device):
            self.model = Llama(shape).to(torch.bfloat16)
            self.optimizer = WideMoments(self.model.parameters())
            self.tokens = torch.randint(shape.vocabulary, (shape.batch, shape.length + 1))

    def step(self) -> None:
        """Train one step; nothing waits for the device."""
        self.model(self.tokens[:, :-1], self.tokens[:, 1:]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def block(self, collect: dict[str, Any] | None, steps: int) -> tuple[float, float]:
        """Return seconds and kernel launches of a step, monitored or not."""
        with tempfile.TemporaryDirectory() as directory:
            monitor = None
            if collect is not None:
                config = {"output_dir": directory, "collect": collect, "on_incident": False}
                monitor = trainsentry.TrainMonitor(config).watch(self.model, self.optimizer)
            self.step()
            synchronize(self.device)
            before, start = self.launches(monitor), time.perf_counter()
            for _ in range(steps):
                self.step()
            synchronize(self.device)
            seconds = (time.perf_counter() - start) / steps
            launches = (self.launches(monitor) - before) / steps
            if monitor is not None:
                monitor.close()
        return seconds, launches

    @staticmethod
    def launches(monitor: trainsentry.TrainMonitor | None) -> int:
        """Return the launches of the fused kernels so far."""
        devices = monitor._loop.watch.rows._devices.values() if monitor is not None and monitor._loop else ()
        return sum(rows.fused.launches for rows in devices if rows.fused is not None)

    def waits(self) -> bool:
        """Return whether a monitored step waits for the device."""
        with tempfile.TemporaryDirectory() as directory:
            config = {"output_dir": directory, "collect": ARMS["+ activations every 10"], "on_incident": False}
            with trainsentry.TrainMonitor(config).watch(self.model, self.optimizer):
                self.step()
                torch.cuda.set_sync_debug_mode("error")
                try:
                    for _ in range(11):
                        self.step()
                except RuntimeError:
                    return True
                finally:
                    torch.cuda.set_sync_debug_mode("default")
        return False


def measure_training(training: Training, rounds: int, steps: int) -> None:
    """Print the table of ratios."""
    for collect in ARMS.values():
        training.block(collect, 2)
    blocks: dict[str, list[tuple[float, float]]] = {name: [] for name in ARMS}
    for round_number in range(rounds):
        names = list(ARMS)
        at = round_number % len(names)
        for name in names[at:] + names[:at]:
            blocks[name].append(training.block(ARMS[name], steps))
    print("| arm | step (ms) | ÷ bare | launches a step |\n|---|---|---|---|")
    for name, of_arm in blocks.items():
        ratios = [arm[0] / bare[0] for arm, bare in zip(of_arm, blocks["bare"], strict=True)]
        middle = f"{statistics.median(ratios):.4f} ({min(ratios):.4f}–{max(ratios):.4f})"
        milliseconds = 1e3 * statistics.median(seconds for seconds, _ in of_arm)
        print(f"| {name} | {milliseconds:.2f} | {middle} | {of_arm[-1][1]:.1f} |", flush=True)
    if training.device == "cuda":
        print(f"\nA monitored step waits for the device: {'YES' if training.waits() else 'no'}")


def measure_bandwidth(device: str, sizes: list[int]) -> None:
    """Print the bandwidths of the kernel and of a copy."""
    print("\n| tensor | dtype | kernel (GB/s) | copy (GB/s) | share |\n|---|---|---|---|---|")
    for megabytes in sizes:
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(megabytes * 2**20 // dtype.itemsize, device=device).to(dtype)
            y = torch.empty_like(x)
            rows = DeviceRows(x.device)
            volume = x.numel() * x.element_size()

            def read(x: torch.Tensor = x, rows: DeviceRows = rows) -> None:
                rows.add(0, x, 0.0)
                rows.clear()

            def copy(x: torch.Tensor = x, y: torch.Tensor = y) -> None:
                y.copy_(x)

            kernel, plain = volume / seconds_of(read, device), 2 * volume / seconds_of(copy, device)
            print(f"| {megabytes} MB | {dtype} | {kernel / 1e9:.0f} | {plain / 1e9:.0f} | {kernel / plain:.0%} |")


def seconds_of(work: Any, device: str, times: int = 20) -> float:
    """Return the seconds of one call, by the device's clock where it has one."""
    work()
    if device != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(times):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / times


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    measure_training(Training(TINY if options.tiny else Shape(), options.device), options.rounds, options.steps)
    if kernels_for(torch.device(options.device)) is None:
        print(f"\nThe fused kernels do not run on {options.device}.")
    else:
        measure_bandwidth(options.device, [1] if options.tiny else [64, 256, 1024])
    name = torch.cuda.get_device_name() if options.device == "cuda" else "no GPU"
    print(f"\n{name}; {describe_machine()}")


if __name__ == "__main__":
    main()
