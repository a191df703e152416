"""Every example of docs/trainers.md runs as it stands, and records steps."""

import re
from importlib.util import find_spec
from pathlib import Path

import page_examples
import pandas as pd
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "trainers.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
SETUP, EXAMPLES = BLOCKS[0], [block for block in BLOCKS[1:] if not block.startswith("# mindspore")]
PACKAGES = ("transformers", "lightning", "accelerate", "deepspeed")


def example_with(text):
    (found,) = [block for block in EXAMPLES if text in block]
    for package in PACKAGES:
        if f"import {package}" in found or f"from {package}" in found:
            pytest.importorskip(package)
    return found


def steps(folder, rank=0):
    table = pd.read_csv(folder / "monitor_output" / f"rank{rank}" / "gradient_0-999.csv")
    return len(table.step.unique())


@pytest.mark.parametrize(
    ("text", "count"), [("HFCallback(", 4), ("LightningCallback(", 4), ("AccelerateTracker(", 8), ("Lookahead(", None)]
)
def test_an_example_of_one_process_runs_and_records_its_steps(text, count, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    exec(SETUP, names)
    exec(example_with(text), names)
    if count is not None:
        assert steps(tmp_path) == count


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize("text", ["fully_shard", "deepspeed.initialize"])
def test_an_example_of_several_ranks_runs_and_records_its_steps(text, two_ranks, tmp_path):
    two_ranks.run(page_examples.run, SETUP, example_with(text), tmp_path)
    assert [steps(tmp_path, rank) for rank in range(2)] == [8, 8]


def test_every_example_is_run():
    named = (
        "HFCallback(",
        "LightningCallback(",
        "AccelerateTracker(",
        "Lookahead(",
        "fully_shard",
        "deepspeed.initialize",
    )
    assert len(EXAMPLES) == len(named)
    assert all(any(text in block for text in named) for block in EXAMPLES)
