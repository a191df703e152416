"""What was recorded of calls, read back from the tables."""

import csv


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
