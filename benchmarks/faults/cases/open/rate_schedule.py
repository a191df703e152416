"""The learning rate is not what its schedule should give."""

from case import Case, Expect
from families import ALL

RATE = (("optimizer*", "*"), ("learning_rate*", "*"), ("update", "*"))


def _times(run, factor):
    for group in run.optimizer.param_groups:
        group["lr"] *= factor


def _one_step(run):
    if run.at_fault:
        _times(run, 10.0)


def _restarted(run):
    if run.at_fault:
        run.schedule.last_epoch = -1
        run.schedule.step()


def _twice(run):
    if run.harmed:
        run.schedule.step()


def _ends_early(run):
    """The last steps of the schedule were counted in epochs of another length: it ends within ten steps."""
    if run.at_fault:
        whole = run.rate
        run.schedule.lr_lambdas = [
            lambda step: whole(step) * max(0.0, 1 - (step - run.fault_step) / 10) for _ in run.schedule.base_lrs
        ]


def _base_rate(run):
    if run.at_fault:
        run.schedule.base_lrs = [2 * x for x in run.schedule.base_lrs]
        _times(run, 2.0)


def _below_zero(run):
    """A linear decay that goes on behind its end."""
    if run.at_fault:
        run.schedule.lr_lambdas = [
            lambda step: 0.05 * (run.fault_step + 2 - step) for _ in run.schedule.base_lrs
        ]  # fmt: skip


CASES = (
    Case(
        "rate_one_step",
        "a learning rate ten times too large at one step",
        Expect(suspects=RATE, within=10),
        ALL,
        before_step=_one_step,
        source="https://github.com/aqlaboratory/openfold/issues/181; https://github.com/lhoyer/MIC/issues/60 (a wrong factor)",
    ),
    Case(
        "warm_up_restarted",
        "the schedule starts anew, with its warm-up",
        Expect(suspects=RATE),
        ALL,
        before_step=_restarted,
        source="https://github.com/lightly-ai/lightly-train/pull/301; https://github.com/PolymathicAI/the_well/pull/63",
    ),
    Case(
        "stepped_twice",
        "the schedule is stepped twice a step",
        Expect(suspects=RATE, within=30),
        ALL,
        before_step=_twice,
        source="https://github.com/huggingface/accelerate/issues/2926; https://github.com/huggingface/transformers/pull/24088",
    ),
    Case(
        "schedule_ends_early",
        "the schedule ends early, at zero",
        Expect(suspects=RATE),
        ALL,
        before_step=_ends_early,
        source="https://github.com/Lightricks/LTX-Video-Trainer/issues/67; https://github.com/huggingface/diffusers/issues/3954",
    ),
    Case(
        "base_rate_doubled",
        "the base rate is doubled: the configuration's number overrides the checkpoint's",
        Expect(suspects=RATE),
        ALL,
        before_step=_base_rate,
        source="https://github.com/bghira/SimpleTuner/pull/3045 (restore warmup LR correctly across resume world sizes)",
    ),
    Case(
        "rate_below_zero",
        "a linear decay goes below zero",
        Expect(suspects=(*RATE, ("loss", "*"))),
        ALL,
        before_step=_below_zero,
        source="https://github.com/huggingface/transformers/issues/132; https://github.com/huggingface/transformers/issues/324",
    ),
)
