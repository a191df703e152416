"""A layer unlike its siblings from the start is named; layers that only resemble each other by name are left alone."""

from dataclasses import replace

import numpy as np
import pytest
from step_records import Records

from trainsentry.anomaly.rules.layer_outliers import LayerOutlierRule
from trainsentry.collectors.series import Layout


@pytest.mark.parametrize(("size", "kind"), [(1e5, "shift"), (1e-5, "dead"), (10.0, None)])
def test_a_layer_unlike_its_siblings_from_the_start(size, kind, alone, judged):
    records = Records()
    rule = alone(LayerOutlierRule, records.table)
    sizes = {(f"blocks.{i}.fc.output.0", "activation_output"): size if i == 2 else 1.0 + i / 10 for i in range(4)}
    assert [f.kind for f in judged(rule, records, range(20), sizes)] == ([kind] if kind else [])


@pytest.mark.parametrize(
    ("shapes", "is_found"),
    [([(16, 4)] * 4, True), ([(16,)] * 4, False), ([(16, 2), (16, 4), (16, 4), (16, 4)], False)],
    ids=["matrices", "biases", "another shape"],
)
def test_only_matrices_of_one_shape_are_siblings(shapes, is_found, alone):
    records = Records()
    rule = alone(LayerOutlierRule, records.table)
    layouts = np.array([records.table.layout_id(Layout(s, "float32", 16)) for s in shapes], np.int32)
    sizes = {(f"{i}.weight", "parameter"): 50.0 if i == 0 else 1.0 for i in range(4)}
    assert rule(replace(records.step(0, sizes), layouts=layouts)) == []
    assert bool(rule(replace(records.step(1, sizes), layouts=layouts))) == is_found
