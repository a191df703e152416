"""Process groups are built wrongly."""

import torch
import torch.distributed as dist
from case import Case, Expect
from communication_hooks import average
from families import DENSE
from torch import nn

PARTED = (("gradient*", "*"), ("parameter", "*"), ("communication*", "*"))


def _reducing(run, change):
    """Have DistributedDataParallel reduce a bucket by `change` once the fault has set in."""

    def hook(state, bucket):
        if not run.harmed:
            return average(bucket)
        future = torch.futures.Future()
        future.set_result(change(bucket.buffer()))
        return future

    run.model = nn.parallel.DistributedDataParallel(run.plain, bucket_cap_mb=0.05)
    run.model.register_comm_hook(None, hook)


def _halves(run):
    """Two groups of two where one of four was meant."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]

    def change(tensor):
        dist.all_reduce(tensor, group=groups[run.rank // 2])
        return tensor / 2

    _reducing(run, change)


def _left_out(run):
    """The group ends one rank too early: the last rank keeps its own gradients."""
    group = dist.new_group([0, 1, 2])

    def change(tensor):
        if run.rank == 3:
            return tensor
        dist.all_reduce(tensor, group=group)
        return tensor / 3

    _reducing(run, change)


def _by_local_rank(run):
    """The sampler is told the rank within its host of two, so that ranks 0 and 2 draw the same."""
    if run.at_fault:
        run.generator.manual_seed(5 + run.rank % 2)


def _other_size(run):
    """Sums are divided by the size of another group."""

    def change(tensor):
        dist.all_reduce(tensor)
        return tensor / 4

    _reducing(run, change)


CASES = (
    Case(
        "group_of_halves",
        "gradients are reduced in two groups of two",
        Expect(suspects=PARTED, within=5),
        DENSE,
        ranks=4,
        build=_halves,
        source="https://github.com/facebookresearch/fairseq/issues/4220; https://github.com/laekov/fastmoe/issues/106",
    ),
    Case(
        "rank_left_out",
        "the last rank is not in the group",
        Expect(suspects=PARTED, within=5),
        DENSE,
        ranks=4,
        build=_left_out,
        source="https://github.com/sgl-project/sglang/pull/32963 (reduced over 2 of 4 peers)",
    ),
    Case(
        "sampler_by_local_rank",
        "two ranks of four draw the data of two others",
        Expect(suspects=(("data", "*"),)),
        DENSE,
        ranks=4,
        before_step=_by_local_rank,
        source="https://github.com/pytorch/pytorch/issues/31771 and case F22 (the sampler's seed and rank)",
    ),
    Case(
        "divided_by_other_size",
        "sums of gradients are divided by the size of another group",
        Expect(suspects=(*PARTED, ("training", "*"))),
        DENSE,
        ranks=2,
        build=_other_size,
        source="https://github.com/pytorch/pytorch/issues/160285 (Wrong-size gradients in Expert Parallel MoE)",
    ),
)
