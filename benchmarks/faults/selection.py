"""Which runs of the fault benchmark are asked for, and which of them this part is to do."""

import argparse
import itertools
import zlib
from collections.abc import Iterator
from typing import Any

import work
from case import Case
from families import UNSEEN

SEEN_EACH, UNSEEN_EACH = 2, 1
"""Families that a fault of the open list runs on, unless all are asked for."""

CONFIGURATIONS = {"default": ("default",), "all": ("everything",), "both": ("default", "everything")}
CONFIGURATIONS["everything"] = CONFIGURATIONS["all"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose runs."""
    parser.add_argument(
        "--list", choices=("first", "open"), default="first", help="the cases F, X, B, or the open list"
    )
    parser.add_argument("--cases", default="", help="ids of cases, or names of files of the open list")
    parser.add_argument("--families", default="", help="model families, or seen, unseen; all: each that a case names")
    parser.add_argument("--seeds", default="", help="one, or first-last; without it 0-3, and 0 for the open list")
    parser.add_argument("--stride", type=int, default=1)
    parser.add_argument("--configuration", "--collect", choices=CONFIGURATIONS, default="all", dest="configuration")
    parser.add_argument("--part", default="1/1", help="k/n: this of n parts, for runs beside each other")


def chosen_families(case: Case, wanted: str = "") -> list[str]:
    """Return the families that a case runs on; which of them depends on its id alone, so that all get their turn."""
    if not case.group:
        return [f for f in case.families if not wanted or f in wanted.split(",")]
    turn = zlib.crc32(case.id.encode())
    seen, unseen = ([f for f in case.families if (f in UNSEEN) == hidden] for hidden in (False, True))
    if wanted == "all":
        return [*seen, *unseen]
    turned = [
        *(seen[(turn + i) % len(seen)] for i in range(min(SEEN_EACH, len(seen)))),
        *(unseen[(turn + i) % len(unseen)] for i in range(min(UNSEEN_EACH, len(unseen)))),
    ]
    named = {"": turned, "seen": [f for f in turned if f not in UNSEEN], "unseen": [f for f in turned if f in UNSEEN]}
    return named[wanted] if wanted in named else [f for f in case.families if f in wanted.split(",")]


def wanted_runs(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the runs that are asked for, of this part alone."""
    cases = work.load_cases(options.list)
    names = set(options.cases.split(",")) if options.cases else set()
    chosen = [c for c in cases.values() if not names or c.id in names or c.group in names]
    first, _, last = (options.seeds or ("0" if options.list == "open" else "0-3")).partition("-")
    seeds = range(int(first), int(last or first) + 1, options.stride)
    part, parts = (int(n) for n in options.part.split("/"))
    return list(itertools.islice(_runs(chosen, seeds, options), part - 1, None, parts))


def _runs(cases: list[Case], seeds: range, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    configurations = CONFIGURATIONS[options.configuration]
    for case in cases:
        several = itertools.product(case.optimizers or ("adamw", "sgd"), seeds, configurations)
        for optimizer, seed, collect in several:
            for family in chosen_families(case, options.families):
                yield {"case": case.id, "family": family, "optimizer": optimizer, "seed": seed, "collect": collect}


def of_run(outcome: dict[str, Any]) -> tuple[Any, ...]:
    """Return which run an outcome is of."""
    return tuple(outcome[key] for key in ("case", "family", "optimizer", "seed", "collect"))
