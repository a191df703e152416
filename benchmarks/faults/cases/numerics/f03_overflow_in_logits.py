"""Attention logits grow until they leave fp16's range."""

import torch
from case import Case, Expect


def _build(run):
    def hook(module, args, output):
        return torch.where(output.abs() > 65504.0, torch.inf * output.sign(), output)

    run.module("blocks.1.attn.logits", "").register_forward_hook(hook)


def _harm(run):
    if run.harmed:
        run.parameter("blocks.1.attn.q_proj.weight", "").data.mul_(1.15)  # torch counts no write


CASE = Case(
    "F03",
    "attention logits grow out of fp16's range",
    Expect(
        ("activation_output", "parameter"),
        ("overflow", "drift", "shift", "spike", "nonfinite"),
        {"gpt": ("blocks.1.attn.q_proj*", "blocks.1.attn.k_proj*", "blocks.1.attn.logits*")},
    ),
    families=("gpt",),
    build=_build,
    before_step=_harm,
)
