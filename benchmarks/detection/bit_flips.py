"""Measures how often the first suspect of an incident is the parameter with the flipped bit.

    python benchmarks/detection/bit_flips.py [--seeds 20] [--clean 5] [--steps 150] [--out FILE.json]

Trains the demo's byte-level GPT under the default configuration, which samples gradients at every step and
weights at every tenth. At step 75 one bit of one weight flips: bit 30 (a factor of 2^128), or with `hard` bit 25
or 26 (a factor of 16 or 256). The seed chooses the parameter, the element and the bit. Prints a line per run and a
table; clean runs must have no incident.
"""

import argparse
import json
import logging
import sys
import tempfile
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))

from machine import describe_machine

from trainsentry.monitor.demo.outcome import Outcome
from trainsentry.monitor.demo.training import train


def run(fault: str, seed: int, steps: int) -> dict[str, object]:
    """Train once and return the outcome as one row."""
    with tempfile.TemporaryDirectory() as directory:
        outcome = train({"output_dir": directory, "on_incident": {"stop": True}}, steps=steps, seed=seed, fault=fault)
    row = describe(outcome, fault, seed)
    print(json.dumps(row), flush=True)
    return row


def describe(outcome: Outcome, fault: str, seed: int) -> dict[str, object]:
    """Return the row of one outcome."""
    first = outcome.incidents[0] if outcome.incidents else None
    within = [s.name for s in first.suspects[:3]] if first else []
    flip = outcome.flip
    return {
        "fault": fault,
        "seed": seed,
        "flipped": flip.parameter if flip else None,
        "from": flip.before if flip else None,
        "to": flip.after if flip else None,
        "first_suspect": first.name if first else None,
        "quantity": first.quantity if first else None,
        "kind": first.kind if first else None,
        "right": outcome.found,
        "within_three": flip is not None and flip.parameter in within,
        "delay": first.last_seen - (outcome.flip_step or 0) if first and flip else None,
        "incidents": len(outcome.incidents),
    }


def main() -> None:
    """Run every case and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--clean", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    logging.getLogger("trainsentry").setLevel(logging.ERROR)
    torch.set_num_threads(2)
    rows = [run(fault, seed, options.steps) for fault in ("flip", "soft") for seed in range(options.seeds)]
    rows += [run("none", seed, options.steps) for seed in range(options.clean)]
    print(f"\n{describe_machine()}\n")
    print("| fault | runs | detected | first suspect right | within three | median delay (steps) |")
    print("|---|---|---|---|---|---|")
    for fault in ("flip", "soft"):
        of = [r for r in rows if r["fault"] == fault]
        delays = sorted(int(str(r["delay"])) for r in of if r["delay"] is not None)
        counts = [sum(bool(r[key]) for r in of) for key in ("incidents", "right", "within_three")]
        print(
            f"| {fault} | {len(of)} | {' | '.join(map(str, counts))} | {delays[len(delays) // 2] if delays else '–'} |"
        )
    clean = [r for r in rows if r["fault"] == "none"]
    print(f"\nclean runs: {len(clean)}, incidents reported: {sum(int(str(r['incidents'])) for r in clean)}")
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
