"""MindSpore's example of docs/trainers.md runs as it stands, and records its steps."""

import re
from pathlib import Path

import pandas as pd

PAGE = Path(__file__).parents[2] / "docs" / "trainers.md"


def test_the_example_runs_and_records_its_steps(tmp_path, monkeypatch):
    (example,) = re.findall(r"^```python\n(# mindspore\n.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    exec(example, {"__name__": "__main__"})
    assert list(pd.read_csv("monitor_output/rank0/gradient_0-999.csv").step.unique()) == [0, 1, 2, 3]
