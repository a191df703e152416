"""A norm divides by something else, or not at all."""

from case import Case, Expect
from families import ALL
from torch import nn

OUTPUT = (("activation_output", "{norm}*"),)
WITH_BATCH_NORM = ("resnet", "vit")


def _evaluates(run):
    if run.at_fault:
        run.place("batch_norm").eval()


def _statistics_stand(run):
    if run.at_fault:
        run.place("batch_norm").momentum = 0.0


def _large_epsilon(run):
    if run.at_fault:
        run.place("norm").eps = 0.5


def _on_output(change):
    def build(run):
        run.place("norm").register_forward_hook(lambda m, a, out: change(m, a[0], out) if run.harmed else out)

    return build


def _one_added(module, x, output):
    """The weight is read as an offset from one."""
    axes = tuple(
        i for i in range(x.dim()) if i != (1 if isinstance(module, (nn.BatchNorm2d, nn.GroupNorm)) else x.dim() - 1)
    )
    shape = [1 if i in axes else n for i, n in enumerate(x.shape)]
    return output + output / module.weight.view(shape).clamp(min=0.1)


def _other_axis(module, x, output):
    """Statistics are taken over the sequence, or over each map alone, not over the features."""
    axes = (1,) if x.dim() == 3 else (2, 3) if x.dim() == 4 else (0,)
    return (x - x.mean(axes, keepdim=True)) / (x.var(axes, keepdim=True) + 1e-5).sqrt() * output.std()


def _skipped(module, x, output):
    return x


CASES = (
    Case(
        "batch_norm_evaluates",
        "one batch norm is in evaluation mode",
        Expect(suspects=(("training", "*"), ("buffer*", "{batch_norm}*"), ("activation_output", "{batch_norm}*"))),
        WITH_BATCH_NORM,
        before_step=_evaluates,
        source="https://github.com/poppinace/indexnet_matting/issues/35; https://github.com/eora-ai/torchok/issues/150",
    ),
    Case(
        "running_statistics_stand",
        "a batch norm's running statistics stand still",
        Expect(suspects=(("buffer*", "{batch_norm}*"), ("training", "{batch_norm}*"))),
        WITH_BATCH_NORM,
        before_step=_statistics_stand,
        source="https://github.com/apache/mxnet/issues/18673; https://github.com/ml-explore/mlx/issues/1960",
    ),
    Case(
        "norm_epsilon",
        "a norm's epsilon is 0.5",
        Expect(suspects=(*OUTPUT, ("training", "{norm}"))),
        ALL,
        before_step=_large_epsilon,
        source="https://github.com/mindspore-lab/mindone/pull/225 (norm_layer-eps of another default); https://github.com/allenai/OLMo/issues/281",
    ),
    Case(
        "norm_weight_plus_one",
        "a norm's weight is read as an offset from one",
        Expect(suspects=OUTPUT),
        ALL,
        build=_on_output(_one_added),
        source="https://github.com/linkedin/Liger-Kernel/issues/74 (Gemma needs RMSNorm with 1.0 offset)",
    ),
    Case(
        "norm_over_other_axis",
        "a norm takes its statistics over another axis",
        Expect(suspects=OUTPUT),
        ALL,
        build=_on_output(_other_axis),
        source="https://github.com/kyegomez/zeta/issues/180 (the normalization should be in the dim -1, not -2)",
    ),
    Case(
        "norm_skipped",
        "a norm gives back its input",
        Expect(suspects=OUTPUT),
        ALL,
        build=_on_output(_skipped),
        source="https://github.com/sgl-project/sglang/pull/32963 (a fused residual and norm that leaves a part out)",
    ),
)
