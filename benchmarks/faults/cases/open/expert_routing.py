"""Tokens go to the wrong experts, or to none."""

import torch
from case import Case, Expect

ROUTING = (
    ("buffer*", "{moe}*"),
    ("activation_output", "{moe}*"),
    ("activation_input", "{moe}.*"),
    ("gradient*", "{moe}*"),
)
FAMILIES = ("moe",)


def _bias(run):
    if run.at_fault:
        run.place("moe").bias[1] += 0.5


def _dead_expert(run):
    """One expert's score is never the largest."""

    def hook(module, args, output):
        return output - 30.0 * torch.eye(4)[2] if run.harmed else output

    run.place("router").register_forward_hook(hook)


def _capacity(run):
    if run.at_fault:
        run.place("moe").capacity = 0.5


def _rich_get_richer(run):
    if run.at_fault:
        run.place("moe").balance = -0.01


def _gates(run):
    """The two gates no longer sum to one."""
    run.place("moe").gates.register_forward_hook(lambda m, a, out: out * 0.6 if run.harmed else out)


def _router_detached(run):
    run.place("router").register_forward_hook(lambda m, a, out: out.detach() if run.harmed else out)


CASES = (
    Case(
        "balancing_bias_jumps",
        "an expert's balancing bias jumps",
        Expect(suspects=ROUTING),
        FAMILIES,
        before_step=_bias,
        source="https://github.com/ROCm/ATOM/pull/2010 (a correction bias that nobody wrote)",
    ),
    Case(
        "dead_expert",
        "an expert gets no token",
        Expect(suspects=(*ROUTING, ("update", "{moe}*"))),
        FAMILIES,
        build=_dead_expert,
        source="https://github.com/pytorch/torchtitan/issues/1506; case F42 (router collapse)",
    ),
    Case(
        "capacity_falls",
        "half of the tokens are dropped",
        Expect(suspects=ROUTING),
        FAMILIES,
        before_step=_capacity,
        source="https://github.com/NVIDIA/Megatron-LM/issues/894; https://github.com/deepseek-ai/DeepSeek-MoE/issues/29",
    ),
    Case(
        "rich_get_richer",
        "the balancing bias moves the wrong way",
        Expect(suspects=ROUTING, within=30),
        FAMILIES,
        before_step=_rich_get_richer,
        source="https://github.com/pytorch/torchtitan/issues/1506 (Correct MoE auxiliary-loss-free load balancing?)",
    ),
    Case(
        "gates_not_normalised",
        "the gates of a token's experts sum to 0.6",
        Expect(suspects=ROUTING),
        FAMILIES,
        build=_gates,
        source="https://github.com/NVIDIA-NeMo/Automodel/pull/1260 (grouped experts that converge worse)",
    ),
    Case(
        "router_detached",
        "the router gets no gradient",
        Expect(suspects=(("gradient*", "{router}*"), ("update", "{router}*"), ("activation_grad*", "{router}*"))),
        FAMILIES,
        build=_router_detached,
        source="https://github.com/pytorch/torchtitan/pull/2416 (router gradients left out of a reduction)",
    ),
)
