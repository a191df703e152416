"""Data is served again after a resume."""

from case import Case, Expect


def _harm(run, inputs, targets):
    kept = run.notes.setdefault("batches", [])
    if run.harmed:
        return kept[(run.step - run.fault_step) % 4 + 60]
    kept.append((inputs, targets))
    return inputs, targets


CASE = Case(
    "F45",
    "data served again",
    Expect(("data", "loss"), ("shift", "spike", "drift", "duplicate_data"), within=40),
    batch=_harm,
)
