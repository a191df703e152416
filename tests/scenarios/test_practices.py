"""What practitioners do on purpose makes no incident, though a monitor may take it for a fault."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "detection"))
import practices


@pytest.mark.parametrize("practice", practices.PRACTICES, ids=lambda practice: practice.__name__)
def test_a_practice_makes_no_incident(practice):
    _, found = practices.run((practice.__name__, "default", 5, 150))
    assert [text for severity, text in found if severity != "note"] == []


@pytest.mark.parametrize("practice", [practices.epochs_of_rollouts, practices.methods_of_a_policy])
def test_rollouts_of_many_shuffled_updates_make_no_incident(practice):
    _, found = practices.run((practice.__name__, "everything", 11, 300))
    assert [text for severity, text in found if severity != "note"] == []
