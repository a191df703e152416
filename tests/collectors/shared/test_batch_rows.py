"""The numbers of a batch's rows are the same for an array and for a tensor."""

import numpy as np
import pytest
import torch

from trainsentry.collectors.shared import batch_rows
from trainsentry.collectors.shared.batch_rows import rows_of_array
from trainsentry.collectors.torch.hooks.last_batches import rows_of

ARRAYS = {
    "usual": np.arange(24.0, dtype=np.float32).reshape(4, 2, 3),
    "not finite": np.asarray([[1.0, np.nan, np.inf], [-np.inf, 0.0, 2.0], [np.nan] * 3]),
    "tokens": np.asarray([[3, 4, 5], [0, 0, 0]]),
    "complex": np.asarray([[3 + 4j, 0], [1, 1j]]),
    "flat": np.asarray([1.0, 2.0, np.inf]),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_and_a_tensor_have_the_same_numbers(name):
    found, expected = rows_of_array(ARRAYS[name]), rows_of(torch.from_numpy(ARRAYS[name]))
    assert found[1] == expected[1]
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)


def test_what_has_no_rows_has_no_numbers():
    assert rows_of_array(np.float32(1.0).reshape(())) is None
    assert rows_of_array(np.empty((0, 3))) is None


def test_of_large_rows_the_beginning_is_looked_at(monkeypatch):
    monkeypatch.setattr(batch_rows, "MOST_ELEMENTS", 8)
    array = np.tile(np.asarray([1.0, 1.0, 100.0]), (4, 1))
    assert rows_of_array(array)[0][:, batch_rows.HIGH].tolist() == [1.0] * 4
