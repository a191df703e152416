"""Writes dumps by hand, checks dumps, and reads the tables of a check; no framework is needed."""

import csv
import json

from trainsentry.monitor.accuracy.check_run import CheckOptions, run_check


def check(dump, out, **options):
    """Check a dump in this process."""
    return run_check(CheckOptions(dump, out, **{"processes": 0, **options}))


def tables(summary):
    """Return the rows of both tables, by call and by output."""
    found = []
    for part in ("result", "details"):
        path = summary.result.with_name(summary.result.name.replace("result", part))
        with path.open(encoding="utf-8-sig", newline="") as file:
            found.append({next(iter(row.values())): row for row in csv.DictReader(file)})
    return found


def write_dump(folder, calls, **head):
    """Write a dump.json with these calls."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "dump.json"
    path.write_text(json.dumps({"task": "statistics", "framework": "pytorch", **head, "data": calls}))
    return path


def tensor(*shape, low=-1.0, high=1.0, dtype="torch.float32", **more):
    """Return the description of a tensor: of torch, or of MindSpore by a dtype such as `Float32`."""
    kind = "torch" if dtype.startswith("torch.") else "mindspore"
    facts = {"type": f"{kind}.Tensor", "dtype": dtype, "shape": list(shape), "Max": high, "Min": low}
    return {**facts, **({"requires_grad": False} if kind == "torch" else {}), **more}


def call(*args, **kwargs):
    """Return the entry of a forward call."""
    return {"input_args": list(args), "input_kwargs": kwargs, "output": []}
