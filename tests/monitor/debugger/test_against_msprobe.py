"""Calls have msprobe's names and order, and forward values equal the ones msprobe wrote."""

import json
import math
from pathlib import Path

import pytest
from debugged import LEVELS, Awkward, Encoder, Tower, debug

DATA = Path(__file__).parents[2] / "data"


@pytest.mark.parametrize("level", LEVELS)
def test_names_are_msprobes_in_their_order(tmp_path, level):
    """docs/debugger.md lists the differences from msprobe 26.2: three groups of calls, each with its reason."""
    golden = json.loads((DATA / "msprobe_names.json").read_text())
    for kind in (Awkward, Tower, Encoder):
        [dump] = debug(tmp_path / kind.__name__, kind=kind, level=level, risk_level="FOCUS")  # its default
        ours = [n for n in dump["dump"]["data"] if n not in SEEN_BY_US_ONLY]
        inside = SEEN_INSIDE if kind is Encoder else {}
        theirs = [inside.get(n, n) for n in golden[kind.__name__][level] if n not in HANDED_ON]
        assert sorted(ours) == sorted(theirs)
        for chosen in (_is_operation, _is_forward):  # modules' backward passes end a node earlier or later
            assert [n for n in ours if chosen(n)] == [n for n in theirs if chosen(n)]


def _is_operation(name):
    return not name.startswith("Module.")


def _is_forward(name):
    return ".forward" in name


HANDED_ON = {f"Module.layer.{name}.Dropout.backward.0" for name in ("dropout", "dropout1", "dropout2")}
"""Dropouts that are off give what they take: they add nothing to the graph."""


SEEN_INSIDE = {f"Torch.relu.0.{d}": f"Functional.relu.0.{d}" for d in ("forward", "backward")}
"""torch's own layer got hold of F.relu before it was replaced; msprobe sees what that calls."""


SEEN_BY_US_ONLY = {
    "VF.gru.0.forward",
    "VF.gru.0.backward",
    "VF.lstm.0.forward",
    "VF.lstm.0.backward",
    "Torch.einsum.0.backward",
    "Tensor.__setitem__.0.backward",
    "Module.relu.ReLU.backward.0",
    "Module.bn.BatchNorm2d.backward.0",
}


def test_forward_values_are_those_that_msprobe_wrote(tmp_path):
    golden = json.loads((DATA / "msprobe_values.json").read_text())
    [dump] = debug(tmp_path, kind=Awkward, level="mix")
    for call, facts in golden.items():
        ours = dump["dump"]["data"][call]
        for group, values in facts.items():
            for one, other in zip(_leaves(ours[group]), _leaves(values), strict=True):
                assert all(_is_close(x, y) for x, y in zip(one, other, strict=True)), (call, group, one, other)


def _leaves(value):
    if isinstance(value, dict) and "dtype" in value:
        return [tuple(value[k] if not isinstance(value[k], list) else tuple(value[k]) for k in FACTS)]
    if isinstance(value, dict) and "type" in value:
        return [json.dumps(value, sort_keys=True)]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [leaf for item in items for leaf in _leaves(item)]


FACTS = ("type", "dtype", "shape", "Max", "Min", "Mean", "Norm", "requires_grad")


def _is_close(x, y):
    return math.isclose(x, y, rel_tol=1e-5, abs_tol=1e-6) if isinstance(x, float) and isinstance(y, float) else x == y
