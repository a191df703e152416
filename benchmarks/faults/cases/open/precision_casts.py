"""Something is rounded that should not be."""

import torch
from case import Case, Expect
from families import ALL, in_bf16


def _weights(run):
    if run.harmed:
        with torch.no_grad():
            for p in run.plain.parameters():
                p.copy_(p.bfloat16())


def _gradients(run):
    if run.harmed:
        for p in run.plain.parameters():
            if p.grad is not None:
                scale = p.grad.abs().max() + 1e-30
                p.grad.copy_((p.grad / scale).to(torch.float8_e5m2).float() * scale)


def _moments(run):
    """The second moment is kept in bf16: what decays by a thousandth a step no longer decays."""
    if run.harmed:
        for state in run.optimizer.state.values():
            state["exp_avg_sq"].copy_(state["exp_avg_sq"].bfloat16())


def _autocast(run):
    in_bf16(run.plain, lambda: run.harmed)


def _four_bits(run):
    if run.harmed:
        with torch.no_grad():
            weight = run.place("layer").weight
            step = weight.abs().max() / 7
            weight.copy_((weight / step).round() * step)


CASES = (
    Case(
        "weights_in_bf16",
        "weights are rounded to bf16 after every update",
        Expect(suspects=(("parameter*", "*"), ("update", "*"), ("optimizer*", "*"))),
        ALL,
        after_update=_weights,
        source="https://github.com/pytorch/ao/pull/1124; https://github.com/meta-pytorch/torchtune/issues/2254",
    ),
    Case(
        "gradients_in_fp8",
        "gradients are rounded to two bits",
        Expect(suspects=(("gradient*", "*"), ("training", "*"))),
        ALL,
        before_update=_gradients,
        source="https://github.com/pytorch/pytorch/issues/120376 (casts to another half than was meant); arXiv 2209.05433 (e5m2 for gradients)",
    ),
    Case(
        "second_moments_in_bf16",
        "second moments are rounded to bf16 after every update",
        Expect(suspects=(("exp_avg_sq", "*"), ("optimizer*", "*")), within=30),
        ALL,
        after_update=_moments,
        source="https://github.com/Nerogar/OneTrainer/issues/1005; https://github.com/karpathy/llm.c/pull/772",
    ),
    Case(
        "autocast_switched_on",
        "the model begins to compute in bf16",
        Expect(suspects=(("activation_*", "*"), ("training", "*"))),
        ALL,
        build=_autocast,
        source="https://github.com/pytorch/pytorch/issues/120376 (autocast around more or less than the forward pass)",
    ),
    Case(
        "layer_in_four_bits",
        "one layer's weights are rounded to four bits",
        Expect(suspects=(("parameter*", "{layer}.weight"), ("update", "{layer}.weight"))),
        ALL,
        before_step=_four_bits,
        source="https://github.com/zyushun/Adam-mini/issues/26 (training into a rounding bias)",
    ),
)
