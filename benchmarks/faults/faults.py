"""Faults planted in real runs, and controls in which nothing is wrong; whether alarms and suspects are right.

    python benchmarks/faults/faults.py [--cases F01,F08] [--seeds 0-3] [--configuration default] [--twins] [--out FILE]
    python benchmarks/faults/faults.py --list open [--families seen] [--configuration both] [--out FILE --resume]
    python benchmarks/faults/faults.py --list open --read FILE [--against FILE] [--json FILE] [--missed FILE]

The first list: two model families, two optimizers, several seeds; each fault has a twin without it (`--twins`). Odd
seeds were never looked at while thresholds were chosen: the table of RESULTS.md is of them alone. The open list
(`cases/open`): seven model families, three of which are never looked at (`families.py`); a fault runs on two seen and
one unseen. `--resume` goes on where a run was broken off, `--part 1/2` does one half.
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

import open_report
import selection
import work
from families import UNSEEN

sys.path.append(str(Path(__file__).parents[2] / "tests" / "helpers"))
sys.path.append(str(Path(__file__).parents[1]))


def outcomes(runs: list[dict[str, Any]], *, faulty: bool, processes: int) -> Iterator[dict[str, Any]]:
    """Run all; those of one rank in processes beside each other, those of several on ranks that live on."""
    cases = work.load_cases()
    alone = [r for r in runs if cases[r["case"]].ranks == 1]
    if alone:
        with multiprocessing.get_context("spawn").Pool(processes) as pool:
            yield from pool.imap(_alone, [(r, faulty) for r in alone])
    for size in sorted({cases[r["case"]].ranks for r in runs} - {1}):
        yield from _together([r for r in runs if cases[r["case"]].ranks == size], size, faulty=faulty)


def _alone(item: tuple[dict[str, Any], bool]) -> dict[str, Any]:
    try:
        return work.run_here(item[0], faulty=item[1])
    except Exception as error:  # noqa: BLE001 - one case that fails must not end the others
        return {**item[0], "error": repr(error), "said": ""}


def _together(runs: list[dict[str, Any]], size: int, *, faulty: bool) -> Iterator[dict[str, Any]]:
    from rank_pool import RankFailure, RankPool

    pool = RankPool(size)
    for who in runs:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # a recorder may still be ending
            try:
                yield pool.run(work.run_on_rank, who, folder, faulty=faulty, timeout=180)[0]
            except RankFailure as error:
                yield {**who, "error": str(error).splitlines()[0], "said": ""}
                pool.close()
                pool = RankPool(size)
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


def _read(paths: list[str] | None) -> list[dict[str, Any]]:
    return [json.loads(line) for path in paths or () for line in Path(path).read_text().splitlines()]


def _run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run what is asked for and not yet done, writing each outcome as it comes; return all of them."""
    out = Path(options.out) if options.out else None
    found = _read([options.out]) if out is not None and options.resume and out.is_file() else []
    if out is not None and not found:
        out.write_text("")
    done = {selection.of_run(o) for o in found}
    runs = [r for r in selection.wanted_runs(options) if selection.of_run(r) not in done]
    for outcome in outcomes(runs, faulty=not options.twins, processes=options.processes):
        if options.list == "open" and outcome["family"] in UNSEEN:
            outcome["said"] = ""
        found.append(outcome)
        if out is not None:
            with out.open("a") as file:
                file.write(json.dumps(outcome) + "\n")
        if options.show and outcome["family"] not in UNSEEN and _is_wrong(outcome):
            who = [outcome.get(k) for k in ("case", "family", "optimizer", "seed", "error", "delay", "early")]
            print(*who, outcome["said"][:700], flush=True)
    return found


def _report_open(found: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Print the tables of the open list, and write the files that are asked for."""
    print("\n".join(open_report.tables(found)))
    if options.json:
        Path(options.json).write_text(json.dumps(open_report.summary(found), indent=1))
    if options.missed:
        Path(options.missed).write_text("\n".join(open_report.missed(found)) + "\n")
    if options.against:
        print("\n".join(open_report.compared(found, _read(options.against), selection.of_run)))


def main() -> None:
    """Run what is asked for and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    selection.add_options(parser)
    parser.add_argument("--twins", action="store_true", help="the same runs without their faults")
    parser.add_argument("--processes", type=int, default=2, help="for runs of one rank")
    parser.add_argument("--out", help="where every outcome is written as it comes, as JSON lines")
    parser.add_argument("--resume", action="store_true", help="keep what --out holds and run only what it lacks")
    parser.add_argument("--read", nargs="+", help="print the table of outcomes that were written, and run nothing")
    parser.add_argument("--show", action="store_true", help="print what was said of each run that is not right")
    parser.add_argument("--json", help="where the open list's sums are written")
    parser.add_argument("--missed", help="where the open list's misses of the seen families are written, as a table")
    parser.add_argument("--against", nargs="+", help="outcomes of another version, to be compared with these")
    options = parser.parse_args()
    found = _read(options.read) if options.read else _run(options)
    if options.list == "open":
        _report_open(found, options)
    else:
        print("\n".join([*table(found), "", *summary(found)]))


if __name__ == "__main__":
    main()
