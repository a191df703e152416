"""Reads the files of a run for tests; a problem with a file is an error."""

import csv
import json


def fail(*problem):
    """Raise the problem that a reader reports."""
    raise AssertionError(problem)


def table(out, rank, quantity):
    """Return the rows of a quantity that a rank has written."""
    rows = []
    for path in sorted((out / f"rank{rank}").glob(f"{quantity}_[0-9]*.csv")):
        with path.open(newline="") as file:
            rows += list(csv.DictReader(file))
    return rows


def numel(row):
    """Return the number of elements of a row's tensor."""
    total = 1
    for n in row["shape"].strip("[]").split(","):
        total *= int(n) if n.strip() else 1
    return total


def grad_summary(out, step=0):
    """Return the rows of a gradient summary by parameter."""
    with (out / "rank0" / f"grad_summary_{step}.csv").open(newline="") as file:
        return {row["param_name"]: row for row in csv.DictReader(file)}


def scalars(directory, limit=0):
    """Return {tag: [(step, value)]} from TensorBoard's own reader; it keeps this many values a series (0: all)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(directory), size_guidance={"scalars": limit}).Reload()
    return {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def json_lines(path):
    """Return the objects of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def first_from_tables(out, *, alone=True):
    """Return rank, name and kind of each incident's first suspect, judged again from the tables.

    With `alone`, without what the ranks have found together while they ran.
    """
    from trainsentry.monitor.offline.history import diagnose

    for path in out.glob("rank*/anomalies.jsonl") if alone else ():
        path.unlink()
    found = diagnose(sorted(out.glob("rank*")), fail, anew=True)
    return [(i.suspects[0].rank, i.suspects[0].name, i.suspects[0].kind) for i in found]
