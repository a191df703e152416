"""The script that measures how near healthy runs come to another level works on the rule as it is."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "detection"))
import levels


def test_a_healthy_run_stays_within_its_bounds(tmp_path):
    levels.record("spirals", "AdamW 1e-3", 1000, 80, str(tmp_path))
    reached = levels.nearest_in(str(tmp_path))
    assert {"activation_output", "loss, by rank"} <= reached.keys()
    assert all(0 <= reach < 1 for reach, _ in reached.values())
    assert max(reach for reach, _ in reached.values()) > 0
