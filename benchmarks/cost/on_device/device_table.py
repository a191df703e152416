"""The targets on a device, and the tables of RESULTS.md with each beside what was measured."""

import math
from dataclasses import dataclass

from device_bandwidth import Bandwidth
from device_dumps import OURS as OUR_DUMPS
from device_dumps import PEER, Dump
from device_steps import DEFAULT, OF_OURS, OURS, V1, V2, WORKLOADS, Cell
from device_trainings import DEEP_GPT, GPT, LARGE_LLAMA, LLAMA

RATIOS = {
    (GPT, DEFAULT): 1.10,
    (GPT, "gradients"): 1.10,
    (GPT, "weights"): 1.10,
    (GPT, "optimizer state"): 1.25,
    (GPT, "activations"): 1.7,
    (GPT, "all"): 2.2,
    (LLAMA, DEFAULT): 1.015,
    (LLAMA, "all"): 1.10,
}
"""Largest step time ÷ the bare step's."""

LARGE_RATIO = 1.01
"""The same with gradients, weights and optimizer state of 1.24 billion parameters at every step."""

SHARE_OF_V1, SHARE_OF_V2 = 0.1, 0.25
"""Largest added time ÷ that of msprobe's two generations, in every workload that they have."""

SHARES_OF_COPY = {"float32": 0.95, "bfloat16": 0.60, "float16": 0.60}
"""Smallest share of a copy's bandwidth, for tensors of 64 MB and above."""

SHARES_OF_DUMP = {"statistics": 1 / 3, "tensor": 1 / 2, "overflow_check": 1 / 3}
"""Largest added time of a dump ÷ that of msprobe's."""


@dataclass
class Tally:
    """How many targets were met, missed, and left unmeasured; models without `targets` are not judged."""

    targets: bool = True
    met: int = 0
    missed: int = 0
    unmeasured: int = 0

    def judge(self, value: float | None, target: float, *, at_least: bool = False) -> str:
        """Return the target with a word on it."""
        sign, digits = ("≥" if at_least else "≤"), f"{target:.3f}".rstrip("0").rstrip(".")
        if not self.targets:
            return f"{sign} {digits}"
        if value is None or math.isnan(value):
            self.unmeasured += 1
            return f"{sign} {digits}: not measured"
        good = value >= target if at_least else value <= target
        self.met += good
        self.missed += not good
        return f"{sign} {digits}: {'met' if good else '**missed**'}"


def steps_table(cells: dict[tuple[str, str], Cell | str], tally: Tally) -> list[str]:
    """Return the table of step times; a text instead of a cell says why it was not measured."""
    lines = [
        "",
        "Step time ÷ the bare step's: median (least–largest) of rounds. Added: time ÷ that which V1 and V2 add.",
        "",
        "| model | workload | bare | trainsentry | target | V1 | V2 | added ÷ V1's | ÷ V2's | memory |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (model, workload), cell in cells.items():
        if isinstance(cell, str):
            tally.unmeasured += 1
            lines.append(f"| {model} | {workload} | not measured: {cell} |" + " |" * 7)
            continue
        target = RATIOS.get((model, workload))
        ours = cell.ratio(OURS)
        shown = [_spread(cell.ratios.get(name), cell.troubles.get(name)) for name in (OURS, V1, V2)]
        shares = ["", ""]
        if workload not in OF_OURS:
            added = [_added(cell.ratio(name)) for name in (OURS, V1, V2)]
            limits = (SHARE_OF_V1, SHARE_OF_V2)
            shares = [_share(added[0], other, limit, tally) for other, limit in zip(added[1:], limits, strict=True)]
        else:
            shown[1:] = ["", ""]
        told = tally.judge(ours, target) if target is not None else ""
        memory = f"{cell.memory[OURS]:+.0f} MB" if OURS in cell.memory else "–"
        row = [
            model,
            workload,
            f"{1e3 * cell.bare:.2f} ms",
            f"**{shown[0]}**",
            told,
            *shown[1:],
            *shares,
            memory,
        ]
        lines.append("| " + " | ".join(row) + " |")
    return lines


def launches_table(found: dict[tuple[str, str], int]) -> list[str]:
    """Return the table of launches, a line for each model; none where the device's work cannot be counted."""
    if not found:
        return ["", "Launches added to a step: not counted."]
    models = list(dict.fromkeys(model for model, _ in found))
    lines = ["", "Launches that a step has more, of which every tenth is sampled in the first two columns:", ""]
    lines += ["| model | " + " | ".join(WORKLOADS) + " |", "|---" * (1 + len(WORKLOADS)) + "|"]
    for model in models:
        counts = [f"+{found[model, each]}" if (model, each) in found else "–" for each in WORKLOADS]
        lines.append(f"| {model} | " + " | ".join(counts) + " |")
    return lines


def large_table(seconds: dict[str, list[float]], waits: bool | None, tally: Tally) -> list[str]:
    """Return the table of the large training."""
    bare = seconds["bare"]
    lines = ["", f"{LARGE_LLAMA}, bf16 with float32 moments, 32,768 tokens a step:", ""]
    lines += ["| what is read | step | ÷ bare | target |", "|---|---|---|---|"]
    for number, (name, of_arm) in enumerate(seconds.items()):
        ratios = [x / y for x, y in zip(of_arm, bare, strict=True)]
        told = tally.judge(_middle(ratios), LARGE_RATIO) if number == 1 else ""
        lines.append(f"| {name} | {1e3 * _middle(of_arm):.2f} ms | {_spread(ratios, digits=4)} | {told} |")
    said = {True: "**yes**", False: "no", None: "this device cannot say"}[waits]
    return [*lines, "", f"A step with everything watched waits for the device: {said}."]


def bandwidth_table(found: list[Bandwidth], tally: Tally) -> list[str]:
    """Return the table of bandwidths."""
    if not found:
        return ["", "Bandwidth of the kernel: not measured, the device's time cannot be counted here."]
    lines = [
        "",
        "| tensors | dtype | the kernel | all of a step | copy, both ways | kernel ÷ copy | target | launches |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        told = tally.judge(one.share, SHARES_OF_COPY[one.dtype], at_least=True)
        speeds = " | ".join(f"{speed / 1e9:.0f} GB/s" for speed in (one.read, one.whole, one.copied))
        lines.append(f"| {one.what} | {one.dtype} | {speeds} | {one.share:.0%} | {told} | {one.launches} |")
    return lines


def dumps_table(found: dict[tuple[str, str, str], Dump], tally: Tally) -> list[str]:
    """Return the table of dumps."""
    lines = ["", "Milliseconds that a dump step adds to a bare one, and the tensors that it writes. msprobe 26 has no"]
    lines += ["overflow_check for torch: ours stands beside its statistics of the same level.", ""]
    lines += [
        "| task, level | bare step | ours adds | msprobe adds | ours ÷ msprobe's | target | tensors: ours, msprobe |"
    ]
    lines += ["|---|---|---|---|---|---|---|"]
    for (subject, task, level), ours in found.items():
        if subject != OUR_DUMPS:
            continue
        beside = "statistics" if task == "overflow_check" else task
        theirs = found.get((PEER, beside, level), Dump(trouble="not installed"))
        share = ours.added / theirs.added if not (ours.trouble or theirs.trouble) and theirs.added > 0 else None
        added = [dump.trouble or f"{dump.added:.1f} ms" for dump in (ours, theirs)]
        told = tally.judge(share, SHARES_OF_DUMP[task])
        shown = f"{share:.2f}" if share is not None else "–"
        tensors = f"{ours.tensors:.0f}, {theirs.tensors:.0f}" if task == "tensor" else ""
        row = [f"{task}, {level}", f"{ours.bare:.1f} ms", *added, shown, told, tensors]
        lines.append("| " + " | ".join(row) + " |")
    return lines


def unmeasured_cells(models: tuple[str, ...] = (LLAMA, GPT, DEEP_GPT)) -> dict[tuple[str, str], Cell | str]:
    """Return every cell of the table of steps, none measured yet."""
    return {(model, workload): "out of time" for model in models for workload in WORKLOADS}


def _share(ours: float | None, theirs: float | None, limit: float, tally: Tally) -> str:
    if ours is None or theirs is None or theirs <= 0:
        tally.unmeasured += 1
        return "–"
    return f"{ours / theirs:.2f} ({tally.judge(ours / theirs, limit)})"


def _added(ratio: float | None) -> float | None:
    return None if ratio is None else ratio - 1


def _middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2] if len(values) % 2 else sum(sorted(values)[len(values) // 2 - 1 :][:2]) / 2


def _spread(values: list[float] | None, trouble: str | None = None, digits: int = 3) -> str:
    if not values:
        return (trouble or "–").replace("|", "/").replace("\n", " ")[:80]
    return f"{_middle(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"
