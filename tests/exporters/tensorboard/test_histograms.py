"""TensorBoard's own reader gets the histograms of single series, as many as its page can show."""

import numpy as np
from step_records import Records
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

from trainsentry.collectors.histogram import counts_of, without_empty_bins
from trainsentry.collectors.statistics import MAX, MIN
from trainsentry.exporters.tensorboard import histograms
from trainsentry.exporters.tensorboard.writer import TensorBoardWriter

SIZES = {("fc.weight", "gradient"): 2.0, ("fc.bias", "gradient"): 1.0, ("loss", "loss"): 0.5}
VALUES = np.array([-0.3, 0.1, 0.1, 0.7, 0.0])


def record_of(records, step):
    counts = np.stack([counts_of(VALUES), counts_of(VALUES), counts_of(np.empty(0))])
    record = records.step(step, SIZES, histograms=without_empty_bins(counts))
    record.values[:2, MIN], record.values[:2, MAX] = VALUES.min(), VALUES.max()
    return record


def written(folder, steps, **options):
    records = Records()
    writer = TensorBoardWriter(folder, records.table, ("norm",), histograms=True, **options)
    sentences = []
    writer._left_out = sentences.append
    for step in steps:
        writer.write(record_of(records, step))
    writer.close()
    read = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    read.Reload()
    tags = [tag for tag in read.Tags()["tensors"] if ".histogram/" in tag]
    return {
        tag: [(e.step, tensor_util.make_ndarray(e.tensor_proto)) for e in read.Tensors(tag)] for tag in tags
    }, sentences


def test_the_buckets_hold_every_value_and_end_at_the_smallest_and_largest(tmp_path):
    found, _ = written(tmp_path, [0])
    assert set(found) == {"gradient.histogram/fc.weight", "gradient.histogram/fc.bias"}
    ((step, buckets),) = found["gradient.histogram/fc.weight"]
    assert (step, buckets[0, 0], buckets[-1, 1], buckets[:, 2].sum()) == (0, -0.3, 0.7, 5.0)
    for left, right, count in buckets:
        assert count == np.count_nonzero((left <= VALUES) & (right >= VALUES))


def test_a_long_run_has_a_bounded_number_of_histograms_from_its_beginning_to_its_end(tmp_path):
    found, _ = written(tmp_path, range(2000))
    steps = [step for step, _ in found["gradient.histogram/fc.weight"]]
    assert steps[:20] == list(range(20))
    assert 100 < len(steps) < 150
    assert steps[-1] > 1890


def test_series_above_the_limit_are_left_out_and_said(tmp_path, monkeypatch):
    monkeypatch.setattr(histograms, "MAX_HISTOGRAMS", 1)
    found, sentences = written(tmp_path, [0, 1, 2], renew_every=1)
    assert set(found) == {"gradient.histogram/fc.weight"}
    assert sentences[-1].startswith("Histograms of 1 series are left out")
