"""Compares the tables in `global/` with whole tensors that were gathered beside the monitor."""

import csv
import math


def rows(directory, table):
    """Rows of one table by (step, name); of a series read twice the last."""
    found = {}
    for path in sorted(directory.glob(f"{table}_[0-9]*.csv")):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                found[int(row["step"]), row["name"]] = row
    return found


def assert_describes(row, whole):
    """The row's statistics are those of `whole`: counts, extremes exactly, norm and mean to rounding."""
    n = whole.numel()
    norm = float(whole.norm())
    assert row["shape"] == str(list(whole.shape)), row
    assert int(row["nans"]) == int(whole.isnan().sum())
    assert int(row["infs"]) == int(whole.isinf().sum())
    assert float(row["zeros"]) == int((whole == 0).sum()) / n
    assert (float(row["min"]), float(row["max"])) == (float(whole.min()), float(whole.max())), (row, whole)
    assert math.isclose(float(row["norm"]), norm, rel_tol=1e-6, abs_tol=1e-300)
    assert abs(float(row["mean"]) - float(whole.mean())) <= 1e-6 * norm / math.sqrt(n)


def assert_global_equals(directory, steps):
    """Every step's tables describe all gathered tensors of that step; an update is the difference of two steps."""
    gradients = bool(steps[0]["gradient"])
    for quantity in ("parameter", "gradient", "exp_avg", "exp_avg_sq"):
        table = rows(directory, quantity)
        expected = {(s, name): t for s, whole in enumerate(steps[:-1]) for name, t in whole[quantity].items()}
        if quantity == "gradient" and not gradients:
            assert table
            continue
        assert set(table) == set(expected), (quantity, set(table) ^ set(expected))
        assert len(expected) >= (len(steps) - 2) * len(steps[0]["parameter"])
        for key, whole in expected.items():
            assert_describes(table[key], whole)
    for (step, name), row in rows(directory, "update").items():
        before, after = steps[step]["parameter"][name], steps[step + 1]["parameter"][name]
        # An update is what was added, rounded to the parameter's dtype.
        rounding = 1e-5 if row["dtype"] == "float32" else 1e-2
        assert math.isclose(float(row["norm"]), float((after - before).norm()), rel_tol=rounding, abs_tol=1e-9)
        ratio = float((after - before).norm() / before.norm()) if float(before.norm()) else math.inf
        assert math.isclose(float(row["ratio"]), ratio, rel_tol=rounding)


def assert_norms_agree(directory, other, rel_tol):
    """Gradients, parameters and state have the norms that they have in another run's tables."""
    for quantity in ("parameter", "gradient", "exp_avg", "exp_avg_sq"):
        mine, theirs = rows(directory, quantity), rows(other, quantity)
        assert set(mine) == set(theirs)
        for key, row in mine.items():
            largest = max(float(theirs[k]["norm"]) for k in theirs if k[0] == key[0])
            assert math.isclose(
                float(row["norm"]), float(theirs[key]["norm"]), rel_tol=rel_tol, abs_tol=rel_tol * largest
            ), (quantity, row, theirs[key])
