"""A buffer that is written more often for some steps in a row is told once; what passes is not."""

import pytest
from step_records import Records

from trainsentry.anomaly.rules.buffers.buffer_writes import LASTS, BufferWritesRule

WRITES = ("buffer_writes.bn.running_var",) * 2
LOSS = ("loss", "loss")


def run(alone, judged, rows, steps=60):
    records = Records()
    rule = alone(BufferWritesRule, records.table)
    return judged(
        rule, records, range(steps), lambda step: {LOSS: 1.0, **({WRITES: rows[step]} if step in rows else {})}
    )


@pytest.mark.parametrize("rows", [{40: 2.0}, {40: 2.0, 43: 1.0}])
def test_more_writes_that_last_are_told_with_buffer_and_first_step(alone, judged, rows):
    [found] = run(alone, judged, rows)
    assert (found.name, found.quantity, found.step, found.value) == ("bn.running_var", "buffer", 40, 2.0)


@pytest.mark.parametrize("rows", [{40: 1.0, 40 + LASTS - 1: 0.0}, {40: 1.0, 41: 0.0, 45: 1.0}, {}])
def test_more_writes_for_a_few_steps_are_by_design_and_so_is_their_return(alone, judged, rows):
    assert run(alone, judged, rows) == []
