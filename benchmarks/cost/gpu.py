"""Measures the monitor's cost on an accelerator beside msprobe's, and prints the tables of RESULTS.md with the targets.

    python benchmarks/cost/gpu.py [--seconds 540] [--device auto] [--part steps] [--output FILE] [--tiny]

Parts: `steps`, three models under six workloads with msprobe's two generations; `launches`, the kernels that each of
them adds to a step; `large`, 1.24 billion parameters; `bandwidth`, of the kernel against a copy's; `dumps`, a
debugger's dump step. `--seconds` is shared among them, and what no time is left for is said so in the table. Where
msprobe is not installed its columns stay empty; TRAINSENTRY_PEERS names an interpreter that has it and the device's
torch. `--tiny --device cpu` checks the script itself.
"""

import argparse
import logging
import os
import sys
import time
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent / "on_device")]

from device_bandwidth import measure_bandwidth
from device_dumps import measure_dumps
from device_steps import OF_OURS, OURS, V1, V2, launches_added, measure, measure_large, waits
from device_table import (
    Tally,
    bandwidth_table,
    dumps_table,
    large_table,
    launches_table,
    steps_table,
    unmeasured_cells,
)
from device_trainings import LARGE_LLAMA, trainings
from device_work import find_device, free_memory, name_of
from machine import describe_machine
from peers import PEERS

PARTS = {"large": 0.15, "dumps": 0.25, "steps": 0.45, "launches": 0.05, "bandwidth": 0.10}
"""Shares of the time, in this order: what an earlier part leaves over, the later ones have. Profiles come last."""


def run_part(part: str, device: torch.device, seconds: float, tally: Tally, *, peer: bool, tiny: bool) -> list[str]:
    """Measure a part in about `seconds`; return its lines."""
    if part == "bandwidth":
        return bandwidth_table(measure_bandwidth(device, tiny=tiny), tally)
    if part == "large":
        training = trainings(device, tiny=tiny)[LARGE_LLAMA]()
        return large_table(measure_large(training, seconds, device), waits(training, device), tally)
    end = time.monotonic() + seconds
    if part == "dumps":
        return dumps_table(measure_dumps(device, end, peer=peer, tiny=tiny), tally)
    if part == "launches":
        return launches_table(count_launches(device, end, tiny=tiny))
    cells = unmeasured_cells()
    for number, (model, workload) in enumerate(cells):
        left = end - time.monotonic()
        if left <= 0 and number:
            break
        names = ["none", OURS] + [V1, V2] * (peer and workload not in OF_OURS)
        make = trainings(device, tiny=tiny)[model]
        try:
            cells[model, workload] = measure(make, workload, names, left / (len(cells) - number), device)
        except torch.OutOfMemoryError:
            cells[model, workload] = "out of device memory"
            free_memory(device)
    return steps_table(cells, tally)


def count_launches(device: torch.device, end: float, *, tiny: bool) -> dict[tuple[str, str], int]:
    """Return the kernels that each workload adds to a step of each model, as far as the time goes."""
    found = {}
    for model, workload in unmeasured_cells():
        if time.monotonic() >= end:
            break
        added = launches_added(trainings(device, tiny=tiny)[model], workload, device)
        if added is not None:
            found[model, workload] = added
        free_memory(device)
    return found


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--part", action="append", choices=list(PARTS), help="only this part; may be repeated")
    parser.add_argument("--output", type=Path, help="also append the tables to this file")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device = find_device(options.device)
    if device is None:
        print("No accelerator: torch finds none here, so nothing was measured (--tiny --device cpu checks the script).")
        return
    peer = find_spec("msprobe") is not None
    if not peer and os.environ.get("TRAINSENTRY_PEERS"):
        os.execv(os.environ["TRAINSENTRY_PEERS"], [os.environ["TRAINSENTRY_PEERS"], *sys.argv])  # it has msprobe
    warnings.filterwarnings("ignore")
    logging.getLogger("trainsentry").setLevel(logging.ERROR)
    lines = [f"{name_of(device)}; {describe_machine()}", ""]
    if not peer:
        lines += [f"msprobe is not installed here (pip install {PEERS[0]}): its columns are empty.", ""]
    if options.tiny:
        lines += ["Tiny models: this checks the script and says nothing of the targets.", ""]
    tell(lines, options.output)
    tally, end = Tally(targets=not options.tiny), time.monotonic() + options.seconds
    left = {part: PARTS[part] for part in PARTS if options.part is None or part in options.part}
    for part in list(left):
        seconds = (end - time.monotonic()) * left.pop(part) / (sum(left.values()) + PARTS[part])
        try:
            lines = run_part(part, device, seconds, tally, peer=peer, tiny=options.tiny)
        except torch.OutOfMemoryError as error:
            lines = ["", f"{part}: not measured, {str(error).splitlines()[0]}"]
        tell(lines, options.output)
        free_memory(device)
        print(f"{part} measured, {end - time.monotonic():.0f} s left", file=sys.stderr, flush=True)
    if tally.targets:
        tell(["", f"Targets: {tally.met} met, {tally.missed} missed, {tally.unmeasured} not measured."], options.output)


def tell(lines: Sequence[str], output: Path | None) -> None:
    """Print what was measured so far, and append it to a file: a run that is cut off keeps it."""
    print("\n".join(lines), flush=True)
    if output is not None:
        with output.open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
