"""What detection remembers does not grow with the run, whatever is sampled."""

import gc
from types import FunctionType, ModuleType

import numpy as np
import pytest
from step_records import Records

from trainsentry.anomaly.baselines import calibration
from trainsentry.anomaly.detection import Detection

FILLED, LONGER = 300, 420
"""Steps after which all that has a bound has reached it, and steps at which it is looked at again."""

MODULES = [f"blocks.{i}" for i in range(4)]
PASSES = [
    (f"{module}.{place}.0", quantity)
    for module in MODULES
    for place, quantity in (
        ("input", "activation_input"),
        ("output", "activation_output"),
        ("output", "activation_grad_output"),
    )
]
GRADIENTS = [(f"{module}.weight", "gradient") for module in MODULES]
STATE = [(f"{module}.weight", quantity) for module in MODULES for quantity in ("parameter", "update", "exp_avg")]
SCALARS = [(name, name) for name in ("loss", "learning_rate", "updated_parameters", "option.0.0.lr")]
DATA = [("input.0", "data"), ("input.1", "data")]


def kept_by(root):
    """Return how many objects, and items in arrays of numbers, are reachable."""
    seen, waiting, total = set(), [root], 0
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, (type, ModuleType, FunctionType)):
            continue
        seen.add(id(one))
        total += one.size if isinstance(one, np.ndarray) else 1
        waiting.extend(gc.get_referents(one))
    return total


@pytest.mark.parametrize("also", [PASSES, GRADIENTS + PASSES + STATE], ids=["passes", "all"])
def test_what_is_remembered_does_not_grow(also, monkeypatch):
    monkeypatch.setattr(calibration, "STEPS", 64)  # it is thousands
    draw, records = np.random.default_rng(0), Records()
    detection, kept = Detection(records.table), []
    for step in range(LONGER + 1):
        series = [*SCALARS, *DATA, *also]
        sizes = dict(zip(series, draw.lognormal(0, 0.1, len(series)).tolist(), strict=True))
        detection.judge(records.step(step, sizes | {("learning_rate", "learning_rate"): 1e-3}))
        if step in (FILLED, LONGER):
            kept.append(kept_by(detection))
    assert kept[1] - kept[0] < (LONGER - FILLED) / 2  # one more object at each step would be twice as much
