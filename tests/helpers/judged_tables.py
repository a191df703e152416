"""What the tables of a run say by themselves."""

from trainsentry.monitor.offline.history import diagnose


def _fail(*problem):
    raise AssertionError(problem)


def first_from_tables(out, *, alone=True):
    """Return rank, name and kind of each incident's first suspect, judged anew.

    With `alone`, without what the ranks have found together while they ran.
    """
    for path in out.glob("rank*/anomalies.jsonl") if alone else ():
        path.unlink()
    found = diagnose(sorted(out.glob("rank*")), _fail, anew=True)
    return [(i.suspects[0].rank, i.suspects[0].name, i.suspects[0].kind) for i in found]
