"""An option of the optimizer is not what it was."""

from case import Case, Expect
from families import ALL

OPTION = (("optimizer*", "*"),)
SIZE = (*OPTION, ("update", "*"))


def _set(groups=slice(None), **options):
    def harm(run):
        if run.at_fault:
            for group in run.optimizer.param_groups[groups]:
                group.update(options)

    return harm


def _left_behind(run):
    if run.at_fault:
        run.schedule.base_lrs[0] *= 0.2
        run.optimizer.param_groups[0]["lr"] *= 0.2


CASES = (
    Case(
        "betas_swapped",
        "Adam's betas change places",
        Expect(suspects=(*OPTION, ("exp_avg*", "*"), ("update", "*"))),
        ALL,
        before_step=_set(betas=(0.999, 0.9)),
        source="https://github.com/mila-iqia/blocks/issues/1159 (Adam moment parameterization is backwards)",
    ),
    Case(
        "decay_on_norms",
        "norms and biases decay too",
        Expect(suspects=OPTION),
        ALL,
        before_step=_set(slice(1, 2), weight_decay=0.1),
        source="https://github.com/ServiceNow/Fast-LLM/issues/542 (norm weights no longer excluded from weight decay)",
    ),
    Case(
        "decay_grows",
        "weight decay with the wrong sign",
        Expect(suspects=OPTION),
        ALL,
        before_step=_set(slice(0, 1), weight_decay=-0.1),
        source="https://github.com/chainer/chainer/issues/261; https://github.com/andersbll/deeppy/issues/17 (the sign of weight decay)",
    ),
    Case(
        "huge_epsilon",
        "Adam's epsilon is 0.01",
        Expect(suspects=SIZE),
        ALL,
        before_step=_set(eps=1e-2),
        source="https://github.com/mindspore-lab/mindone/pull/225 (an epsilon of another default, found by comparing)",
    ),
    Case(
        "momentum_lost",
        "SGD goes on without its momentum",
        Expect(suspects=(*SIZE, ("momentum_buffer", "*"))),
        ALL,
        before_step=_set(momentum=0.0),
        optimizers=("sgd",),
        source="https://github.com/deepspeedai/DeepSpeed/pull/7786 (optimizer options and state lost at a resume)",
    ),
    Case(
        "maximised",
        "the optimizer climbs",
        Expect(suspects=(*SIZE, ("loss", "*"))),
        ALL,
        before_step=_set(maximize=True),
        source="https://docs.pytorch.org/docs/stable/generated/torch.optim.AdamW.html (maximize, a flag of a group)",
    ),
    Case(
        "group_left_behind",
        "the rate falls in one group and stays in the other",
        Expect(suspects=(*SIZE, ("learning_rate*", "*"))),
        ALL,
        before_step=_left_behind,
        source="https://github.com/huggingface/transformers/issues/20029; https://github.com/pytorch/pytorch/issues/79888",
    ),
)
