"""Every reader survives any file: inputs made by hypothesis, and our own files changed at odd places.

The readers, and what they begin with, are those that `benchmarks/limits/fuzz_readers.py` fuzzes for longer.
"""

import contextlib
import random
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

BENCHMARKS = Path(__file__).parents[1] / "benchmarks" / "limits"
sys.path.append(str(BENCHMARKS))
if not BENCHMARKS.is_dir():
    pytest.skip("the benchmarks are not in this distribution", allow_module_level=True)

from fuzz_mutators import csv_mutator, json_mutator  # noqa: E402
from fuzz_targets import MUTATED, TARGETS, seeds_of  # noqa: E402

from trainsentry.exporters.files.foreign_files import InputError  # noqa: E402

ON_TORCH = {"pt", "replay"}
SLOW = {"report": 4, "csv2tb": 4, "run": 2}
"""How many times fewer inputs a reader gets: it writes pictures, or reads five files."""


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_a_reader_ends_with_content_or_its_own_error(name):
    if name in ON_TORCH:
        pytest.importorskip("torch")
    for module in {"parquet": ["pyarrow"], "zstd": ["zstandard"]}.get(name, []):
        pytest.importorskip(module)
    seeds = list(seeds_of(name))

    def flipped(data, most):
        dice = random.Random(data)
        place = dice.randrange(len(data)) if data else 0
        return (data[:place] + dice.randbytes(dice.randrange(4)) + data[place + dice.randrange(4) :])[:most]

    change = {"json": json_mutator, "csv": csv_mutator}.get(MUTATED.get(name, ""), lambda m: lambda d, n, _: m(d, n))
    change = change(flipped)

    @settings(
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=40 // SLOW.get(name, 1),
        suppress_health_check=list(HealthCheck),
    )
    @given(
        st.sampled_from(seeds) | st.binary(max_size=200),
        st.lists(st.integers(0, 1 << 32), max_size=4),
        st.integers(0, 4000),
    )
    def survive(data, changes, cut):
        for seed in changes:
            data = change(data, 4000, seed)
        with contextlib.suppress(InputError):
            TARGETS[name](data[: cut or None])

    survive()
