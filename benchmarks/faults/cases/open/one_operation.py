"""One operation is computed with too little precision, or without what keeps it finite."""

import torch
from case import Case, Expect
from families import ALL, ATTENTION, IMAGES, pixels
from torch import nn


def _rounded_logits(run):
    for name, module in run.plain.named_modules():
        if name.endswith(".logits"):
            module.register_forward_hook(lambda m, a, out: out.bfloat16().float() if run.harmed else out)


def _unscaled(run):
    run.place("logits").register_forward_hook(lambda m, a, out: out * 3.0 if run.harmed else out)


def _blank(run, inputs, targets):
    """Images are standardised one by one without an epsilon, and one is blank: zero divided by zero."""

    def change(x):
        x = x.clone()
        x[3] = float("nan")
        return x

    return (pixels(inputs, change) if run.at_fault else inputs), targets


def _coarse_sum(run):
    """A layer's products are summed in a float of three bits, a channel after the other."""
    layer = run.place("layer")
    dense = layer.weight.dim() == 2

    def hook(module, args, output):
        if not run.harmed:
            return output
        bias = 0.0 if module.bias is None else module.bias if dense else module.bias[:, None, None]
        whole = torch.zeros_like(output)
        for i in range(module.weight.shape[1]):
            x, w = args[0][..., i : i + 1] if dense else args[0][:, i : i + 1], module.weight[:, i : i + 1]
            part = nn.functional.linear(x, w) if dense else nn.functional.conv2d(x, w, padding=1)
            whole = (whole + part).detach().to(torch.float8_e4m3fn).float()
        return output + (whole + bias - output).detach()

    layer.register_forward_hook(hook)


def _clipped(run):
    run.clip = 0.1


def _half_norm(run):
    """The norm that gradients are clipped by is summed in half precision while they carry a loss scale: it is Inf."""
    if run.harmed:
        gradients = [p.grad for p in run.plain.parameters() if p.grad is not None]
        norm = float(sum((1024 * g).half().square().sum() for g in gradients)) ** 0.5 / 1024
        for gradient in gradients:
            gradient.mul_(min(run.notes.setdefault("clip", run.clip) / (norm + 1e-6), 1.0))
        run.clip = None


CASES = (
    Case(
        "logits_in_bf16",
        "attention logits are rounded to bf16",
        Expect(suspects=(("activation_output", "*attn*"), ("activation_grad*", "*attn*")), within=30),
        ATTENTION,
        build=_rounded_logits,
        source="https://github.com/apple/axlearn/pull/18; https://github.com/huggingface/transformers/pull/18057",
    ),
    Case(
        "attention_unscaled",
        "the logits of one attention are three times too large",
        Expect(suspects=(("activation_output", "{logits}*"), ("activation_output", "{attention}*"))),
        ATTENTION,
        build=_unscaled,
        source="https://github.com/NeuraLegion/shainet/pull/176 (the missing query scale)",
    ),
    Case(
        "blank_image",
        "a blank image is standardised without an epsilon",
        Expect(suspects=(("data", "*"), ("activation_input", "{first}.input*")), within=2),
        IMAGES,
        batch=_blank,
        source="https://github.com/martinsbruveris/tensorflow-image-models/issues/78 (uniform images)",
    ),
    Case(
        "coarse_sum",
        "a layer's products are summed with three bits",
        Expect(suspects=(("activation_output", "{layer}*"),)),
        ("gpt", "lstm", "moe", "resnet", "llama", "vit", "diffusion"),
        build=_coarse_sum,
        source="https://github.com/tenstorrent/tt-metal/pull/52327 (HiFi3 with fp32 dest accumulation)",
    ),
    Case(
        "norm_in_half",
        "the norm for clipping is summed in half precision",
        Expect(suspects=(("training", "*"), ("gradient", "*"), ("grad_norm", "*"))),
        ALL,
        prepare=_clipped,
        before_update=_half_norm,
        source="https://github.com/vllm-project/speculators/pull/788 (sums in bf16 lose what is small)",
    ),
)
