"""What practitioners do on purpose makes no incident, though a monitor may take it for a fault."""

import sys
from pathlib import Path
from typing import Final

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "detection"))
import practices
from practice_training import Training

KNOWN: Final = 400
"""Batches after which the levels of rollouts are recognised; before, they are few and look like one shift."""

QUIET = [practice for practice in practices.PRACTICES if practice is not practices.epochs_of_rollouts]


@pytest.mark.parametrize("practice", QUIET, ids=lambda practice: practice.__name__)
def test_a_practice_makes_no_incident(practice):
    _, found = practices.run((practice.__name__, "default", 5, 150))
    assert [text for severity, text in found if severity != "note"] == []


def test_rollouts_of_many_shuffled_updates_make_no_incident_once_there_were_some(tmp_path):
    run = Training(str(tmp_path), practices.COLLECT["default"], 11, 700)
    practices.epochs_of_rollouts(run)
    run.monitor.close()
    assert [i.summary for i in run.monitor.incidents if i.step >= KNOWN] == []
