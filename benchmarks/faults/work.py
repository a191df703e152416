"""Runs one case, in this process or on every rank of a pool."""

import contextlib
import dataclasses
import importlib
import io
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent, *sorted(HERE.glob("cases/*/"))):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

os.environ["TRAINSENTRY_REPORT"] = "0"  # nobody reads a page of each of hundreds of runs

COLLECT = ("everything", "default")
LISTS = ("first", "open")


def load_cases(wanted: str = "") -> dict[str, Any]:
    """Return the cases of a list, or of both, by id: the first in the order of its ids, the open by file."""
    names = sorted(p.stem for p in HERE.glob("cases/*/[a-z][0-9]*.py"))
    first = [importlib.import_module(name).CASE for name in names] if wanted != "open" else []
    groups = sorted(p.stem for p in HERE.glob("cases/open/*.py")) if wanted != "first" else []
    opened = [
        dataclasses.replace(case, group=group, optimizers=case.optimizers or ("adamw",))
        for group in groups
        for case in importlib.import_module(group).CASES
    ]
    return {case.id: case for case in (*first, *opened)}


def run_here(who: dict[str, Any], *, faulty: bool) -> dict[str, Any]:
    """Run a single-rank case; return its outcome."""
    with tempfile.TemporaryDirectory() as folder:
        return _run(who, Path(folder), faulty=faulty)


def run_on_rank(who: dict[str, Any], folder: str, *, faulty: bool) -> dict[str, Any] | None:
    """Run this rank's part of a case; rank 0 returns the outcome."""
    import torch.distributed as dist

    found = _run(who, Path(folder), faulty=faulty)
    dist.barrier()
    return found if dist.get_rank() == 0 else None


def _run(who: dict[str, Any], out: Path, *, faulty: bool) -> dict[str, Any]:
    import torch
    from other_rules import verdicts
    from outcome import first_from_tables, first_live, judge
    from training import EVERYTHING, Run

    logging.getLogger("trainsentry").setLevel(logging.CRITICAL + 1)
    torch.set_num_threads(1)
    case = load_cases()[who["case"]]
    run = Run(case, who["family"], who["optimizer"], who["seed"], faulty=faulty)
    with contextlib.redirect_stderr(io.StringIO()):
        run.train(out, EVERYTHING if who["collect"] == "everything" else {})
    found = judge(case, who, out, run.fault_step, faulty=faulty, steps=run.steps).to_json()
    if run.rank == 0 and not case.group:  # the open list is long: it is judged once
        found["others"] = verdicts(case, who["family"], out, run.fault_step, faulty=faulty)
        live = first_live(out)
        found["same_anew"] = first_from_tables(out, alone=False) == live
        found["same_from_tables"] = first_from_tables(out, alone=True) == live
    return found
