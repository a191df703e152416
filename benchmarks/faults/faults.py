"""Faults planted in real runs, and controls in which nothing is wrong; whether alarms and suspects are right.

    python benchmarks/faults/faults.py [--cases F01,F08] [--seeds 0-3] [--collect everything] [--twins] [--out FILE]

Two model families, two optimizers, several seeds; each fault has a twin without it (`--twins`). Odd seeds were never
looked at while thresholds were chosen: the table of RESULTS.md is of them alone.
"""

import argparse
import itertools
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import work

sys.path.append(str(Path(__file__).parents[2] / "tests" / "helpers"))
sys.path.append(str(Path(__file__).parents[1]))


def wanted(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the runs that are asked for."""
    cases = work.load_cases()
    chosen = options.cases.split(",") if options.cases else list(cases)
    first, _, last = options.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1, options.stride)
    return [
        {"case": c, "family": family, "optimizer": optimizer, "seed": seed, "collect": options.collect}
        for c, optimizer, seed in itertools.product(chosen, ("adamw", "sgd"), seeds)
        for family in cases[c].families
    ]


def outcomes(runs: list[dict[str, Any]], *, faulty: bool) -> Iterator[dict[str, Any]]:
    """Run all; those of one rank in two processes beside each other, those of two on ranks that live on."""
    cases = work.load_cases()
    alone = [r for r in runs if cases[r["case"]].ranks == 1]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        yield from pool.imap(_alone, [(r, faulty) for r in alone])
    together = [r for r in runs if cases[r["case"]].ranks > 1]
    if together:
        yield from _together(together, faulty=faulty)


def _alone(item: tuple[dict[str, Any], bool]) -> dict[str, Any]:
    try:
        return work.run_here(item[0], faulty=item[1])
    except Exception as error:  # noqa: BLE001 - one case that fails must not end the others
        return {**item[0], "error": repr(error), "said": ""}


def _together(runs: list[dict[str, Any]], *, faulty: bool) -> Iterator[dict[str, Any]]:
    from rank_pool import RankFailure, RankPool

    pool = RankPool(2)
    for who in runs:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # a recorder may still be ending
            try:
                yield pool.run(work.run_on_rank, who, folder, faulty=faulty, timeout=180)[0]
            except RankFailure as error:
                yield {**who, "error": str(error).splitlines()[0], "said": ""}
                pool.close()
                pool = RankPool(2)
    pool.close()


def table(found: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the result table."""
    cases = work.load_cases()
    yield "| case | | runs | detected | delay | first suspect | within 3 | kind | incidents | early |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for name, group in itertools.groupby(sorted(found, key=lambda o: o["case"]), key=lambda o: o["case"]):
        rows = [o for o in group if "error" not in o]
        if not rows:
            yield f"| {name} | {cases[name].title} | failed | | | | | | | |"
            continue
        n, early = len(rows), sum(o["early"] for o in rows)
        if cases[name].expect.silent:
            yield f"| {name} | {cases[name].title} | {n} | | | | | | | {early} |"
            continue
        delays = sorted(o["delay"] for o in rows if o["delay"] is not None)
        counts = [sum(o[k] for o in rows) for k in ("detected", "first_right", "within_three", "kind_right")]
        middle = delays[len(delays) // 2] if delays else "–"
        each = sum(o["incidents"] for o in rows) / n
        shown = [name, cases[name].title, n, counts[0], middle, *counts[1:], f"{each:.1f}", early]
        yield "| " + " | ".join(map(str, shown)) + " |"


def summary(found: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the figures of the whole."""
    cases = work.load_cases()
    good = [o for o in found if "error" not in o]
    faults = [o for o in good if not cases[o["case"]].expect.silent]
    for name, hard in (("hard", True), ("soft", False)):
        rows = [o for o in faults if cases[o["case"]].expect.hard == hard]
        if rows:
            yield f"{name} faults detected: {sum(o['detected'] for o in rows)} of {len(rows)}"
    caught = [o for o in faults if o["detected"]]
    if caught:
        for key in ("first_right", "within_three", "kind_right", "block_right"):
            yield f"{key}, of those detected: {sum(o[key] for o in caught) / len(caught):.1%}"
        yield f"incidents a detected fault: {sum(o['incidents'] for o in caught) / len(caught):.2f}"
    for key, what in (("same_anew", "judged anew"), ("same_from_tables", "alone")):
        again = [o[key] for o in good if o.get(key) is not None]
        yield f"the same first suspects from the tables {what}: {sum(again)} of {len(again)} runs"
    yield from _others(faults, good)
    steps = sum(o["steps"] if cases[o["case"]].expect.silent else min(o["steps"], 90) for o in good)
    yield f"false incidents: {sum(o['early'] for o in good)} in {steps} clean steps"


def _others(faults: list[dict[str, Any]], good: list[dict[str, Any]]) -> Iterator[str]:
    """Yield what rules of other tools made of the same rows."""
    for name in good[0]["others"] if good else ():
        found = [o["others"][name] for o in faults if "detected" in o["others"][name]]  # twins have no fault
        caught = sum(f["detected"] for f in found)
        right = sum(f["first_right"] for f in found)
        clean, wrong = (sum(o["others"][name][key] for o in good) for key in ("clean_steps", "false_steps"))
        yield (
            f"{name}: {caught} of {len(found)} faults flagged, first suspect right in {right}; flags at {wrong} of "
            f"{clean} clean steps"
        )


def _is_wrong(outcome: dict[str, Any]) -> bool:
    if "error" in outcome or outcome["early"]:
        return True
    return not work.load_cases()[outcome["case"]].expect.silent and not (
        outcome["first_right"] and outcome["kind_right"]
    )


def main() -> None:
    """Run what is asked for and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="")
    parser.add_argument("--seeds", default="0-3")
    parser.add_argument("--stride", type=int, default=1)
    parser.add_argument("--collect", choices=work.COLLECT, default="everything")
    parser.add_argument("--twins", action="store_true", help="the same runs without their faults")
    parser.add_argument("--out", help="where every outcome is written as it comes, as JSON lines")
    parser.add_argument("--read", nargs="+", help="print the table of outcomes that were written, and run nothing")
    parser.add_argument("--show", action="store_true", help="print what was said of each run that is not right")
    options = parser.parse_args()
    found = [json.loads(line) for path in options.read or () for line in Path(path).read_text().splitlines()]
    if options.out:
        Path(options.out).write_text("")
    for outcome in () if options.read else outcomes(wanted(options), faulty=not options.twins):
        found.append(outcome)
        if options.out:
            with Path(options.out).open("a") as file:
                file.write(json.dumps(outcome) + "\n")
        if options.show and _is_wrong(outcome):
            who = [outcome.get(k) for k in ("case", "family", "optimizer", "seed", "error", "delay", "early")]
            print(*who, outcome["said"][:700], flush=True)
    print("\n".join([*table(found), "", *summary(found)]))


if __name__ == "__main__":
    main()
