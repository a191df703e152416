"""A rank's own gradient, before the reduction, is recorded apart from the reduced one."""

import importlib.util
import math

import pytest
import torch
from before_reduction import CONFIG, by_rank, poison
from sharded_training import train
from strategy import batches, make_net
from written_files import numel

deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
SHARDED = ["Fsdp2", "Fsdp2Kept", "Fsdp2Mixed", "Fsdp1", "Fsdp1Original", *(
    pytest.param(n, marks=deepspeed) for n in ("Zero1", "Zero2", "Zero3")
)]  # fmt: skip
ALL = ["Ddp", "DdpViews", *SHARDED]


@pytest.mark.parametrize("name", ALL)
def test_a_nan_of_one_ranks_gradient_shows_before_reduction_on_that_rank_alone(two_ranks, tmp_path, name):
    two_ranks.run(train, name, tmp_path, steps=1, config=CONFIG, poison=poison, gather=False)
    before, after = by_rank(tmp_path, "gradient_unreduced"), by_rank(tmp_path, "gradient")
    assert {r["name"] for r in before[0].values()} == {r["name"] for r in before[1].values()} == set(names())
    assert all(r["nans"] == "0" for r in before[0].values())
    assert all(int(r["nans"]) > 0 for r in before[1].values())
    assert all(int(r["nans"]) > 0 for own in after for r in own.values() if r["shape"] != "[0]" and numel(r))


def names():
    return [n for n, _ in make_net().named_parameters()]


def local_gradients(rank, dtype=torch.float32):
    """Return the gradient that each of two micro-batches adds on a rank, by (micro-step, name)."""
    net, found = make_net(dtype), {}
    for i, x in enumerate(batches(1, 2)[0]):
        (net(x[rank::2]).square().mean() / 2).backward()
        for name, parameter in net.named_parameters():
            found[i, name] = parameter.grad.double().clone()
            parameter.grad = None
    return found


@pytest.mark.parametrize("name", ["Ddp", *(n for n in SHARDED if n != "Fsdp2Mixed")])
def test_a_row_says_whether_it_is_a_running_sum_or_one_micro_batch(two_ranks, tmp_path, name):
    two_ranks.run(train, name, tmp_path, steps=1, micro_steps=2, config=CONFIG, gather=False)
    for rank, own in enumerate(by_rank(tmp_path, "gradient_unreduced")):
        expected = local_gradients(rank)
        assert set(own) == {(0, i, n) for i, n in expected}
        for (_, micro_step, parameter), row in own.items():
            value = expected[micro_step, parameter]
            if row["holds"] == "running_sum":
                value = sum(expected[i, parameter] for i in range(micro_step + 1))
            assert row["holds"] == ("running_sum" if name == "Ddp" else "micro_batch")
            assert row["shape"] == str(list(value.shape))
            assert math.isclose(float(row["norm"]), float(value.norm()), rel_tol=1e-5, abs_tol=1e-7), (name, row)
