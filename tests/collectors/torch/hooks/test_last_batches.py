"""The inputs of the last steps are kept by reference, within bounds, as long as nobody writes to them."""

import gc
import weakref

import numpy as np
import pytest
import torch
from tiny_models import mlp

import trainsentry
from trainsentry.collectors.torch.hooks import last_batches
from trainsentry.collectors.torch.hooks.last_batches import KEPT_STEPS, LastBatches, rows_of


def test_a_batch_is_found_by_how_many_steps_ago_it_came():
    kept, given = LastBatches(), [torch.randn(4, 3) for _ in range(KEPT_STEPS + 2)]
    for tensor in given:
        kept.open_step()
        kept.keep("input.0", 0, tensor)
    for steps_back in range(KEPT_STEPS):
        [found] = kept.of(steps_back)
        assert found.tensor.data_ptr() == given[-1 - steps_back].data_ptr()
    assert kept.of(KEPT_STEPS) == kept.of(-1) == []


def test_a_batch_that_was_written_over_is_left_out():
    kept, buffer = LastBatches(), torch.randn(4, 3)
    kept.open_step()
    kept.keep("input.0", 0, buffer)
    buffer.copy_(torch.randn(4, 3))
    assert kept.of(0) == []


def test_older_batches_go_first_where_memory_is_short(monkeypatch):
    monkeypatch.setattr(last_batches, "KEPT_BYTES", 100 * 4 * 2)
    kept = LastBatches()
    for _ in range(3):
        kept.open_step()
        kept.keep("input.0", 0, torch.randn(100))
    assert [len(kept.of(back)) for back in range(3)] == [1, 1, 0]
    kept.open_step()
    kept.keep("input.0", 0, torch.randn(1000))
    assert not any(kept.of(back) for back in range(3))


def test_a_graph_before_the_model_is_not_kept_alive():
    kept, weight, saved = LastBatches(), torch.randn(3, requires_grad=True), torch.randn(3)
    kept.open_step()
    kept.keep("input.0", 0, weight * saved)
    before = weakref.ref(saved)
    del saved
    gc.collect()
    assert before() is None
    assert kept.of(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_rows_are_those_of_numpy(dtype):
    x = (torch.randn(6, 5, 2) * 4).to(dtype)
    if dtype.is_floating_point:
        x[2, 0, 0] = torch.nan
    found, elements = rows_of(x)
    assert elements == 10
    wide = (x.abs() if x.is_complex() else x).double().reshape(6, -1).numpy()
    for row, values in zip(found, wide, strict=True):
        finite = values[np.isfinite(values)]
        want = [10 - len(finite), finite.min(), finite.max(), finite.mean(), np.sqrt((finite**2).mean())]
        np.testing.assert_allclose(row, want, 1e-6)


def test_nothing_is_kept_after_the_end(tmp_path):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = trainsentry.TrainMonitor({"output_dir": str(tmp_path)}).watch(model, optimizer)
    x = torch.randn(4, next(model.parameters()).shape[1])
    model(x).sum().backward()
    optimizer.step()
    before = weakref.ref(x)
    monitor.close()
    del x
    gc.collect()
    assert before() is None


def test_a_view_counts_with_all_the_memory_that_it_keeps(monkeypatch):
    monkeypatch.setattr(last_batches, "KEPT_BYTES", 1000)
    kept = LastBatches()
    kept.open_step()
    kept.keep("input.0", 0, torch.randn(10, 100)[:, 0])
    assert kept.of(0) == []


def test_infinities_of_a_mask_are_no_fault_of_its_rows():
    mask = torch.full((6, 6), -torch.inf).triu(1)
    assert rows_of(mask)[0][:, 0].tolist() == [0.0] * 6
