"""An input that gets lost is told; programs whose inputs come and go, or are written otherwise, are left alone."""

import pytest
from step_records import Records

from trainsentry.anomaly.incidents.sentence import subject
from trainsentry.anomaly.rules.data.missing_input import GIVEN_BEFORE, MissingInputRule

TOKENS, MASK, LARGE, PART, NEW = (
    (name, "activation_input") for name in ("input.tokens", "input.mask", "input.image", "input.image.part", "input.x")
)
OUTPUT = "fc.output.0", "activation_output"
AT = GIVEN_BEFORE + 20


def run(alone, given, steps=80):
    """Return what is found; `given(step)` are the inputs of a step, or several lists of them."""
    records, found = Records(), []
    judge = alone(MissingInputRule, records.table)
    for step in range(steps):
        for keys in [*given(step), [OUTPUT]]:
            found += judge(records.step(step, dict.fromkeys(keys, 1.0)))
    return [(f.name, f.quantity, f.step, f.last_clean) for f in found]


def test_an_input_that_is_given_no_more_is_told_once_by_its_first_step(alone):
    told = run(alone, lambda s: [[TOKENS, MASK] if s < AT else [TOKENS]])
    assert told == [("input.mask", "data", AT, AT - 1)]
    assert subject("input.mask", "data") == "input.mask (data)"


@pytest.mark.parametrize(
    "given",
    [
        lambda s: [[TOKENS, MASK]],
        lambda s: [[TOKENS, MASK] if s % 3 else [TOKENS]],
        lambda s: [[TOKENS, MASK] if s < GIVEN_BEFORE - 2 else [TOKENS]],
        lambda s: [[TOKENS, MASK] if s not in (AT, AT + 1) else [TOKENS]],
        lambda s: [[TOKENS, MASK] if s < AT else []],  # no pass at all
        lambda s: [[TOKENS, MASK] if s < AT else [TOKENS, NEW]],  # the call was written otherwise
        lambda s: [[TOKENS, LARGE, PART] if s % 10 == 0 else [TOKENS, PART]],
        lambda s: [[TOKENS, PART] if s < AT else [TOKENS, LARGE]],  # images are small from now on
        lambda s: [[TOKENS], [MASK]],
        lambda s: [[TOKENS], [MASK, (*MASK, 1)] if s < AT else [MASK]],
    ],
)
def test_inputs_that_come_and_go_or_change_their_names_are_nothing(alone, given):
    assert run(alone, given) == []
