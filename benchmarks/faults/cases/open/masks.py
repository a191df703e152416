"""Attention or dropout hides what it should not, or shows what it should hide."""

import torch
from case import Case, Expect
from families import CAUSAL, DROPOUT

HIDDEN = 1e4
SUSPECTS = (("activation_output", "*attn*"), ("activation_grad*", "*attn*"), ("loss", "*"))


def _with_mask(change):
    """Return what changes every attention's logits by a function of their length."""

    def build(run):
        def hook(module, args, output):
            return output + change(output.shape[-1]) if run.harmed else output

        for name, module in run.plain.named_modules():
            if name.endswith(".logits"):
                module.register_forward_hook(hook)

    return build


def _lost(length):
    return torch.full((length, length), HIDDEN).triu(1)


def _inverted(length):
    return torch.full((length, length), HIDDEN).triu(1) - torch.full((length, length), HIDDEN).tril(0)


def _off_by_one(length):
    """The next token is seen too."""
    return _lost(length) - torch.full((length, length), HIDDEN).triu(2)


def _same_dropout(run):
    """The generator of dropout is put back before each forward pass, so that the mask is always the same."""
    module = run.place("dropout")
    whole = module.forward

    def forward(x):
        if not run.harmed:
            return whole(x)
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return whole(x)

    module.forward = forward


CASES = (
    Case(
        "causal_mask_lost",
        "attention sees what comes after",
        Expect(suspects=SUSPECTS),
        CAUSAL,
        build=_with_mask(_lost),
        source="https://github.com/huggingface/transformers/issues/48745; https://github.com/keras-team/keras/issues/23038",
    ),
    Case(
        "mask_inverted",
        "attention sees only what comes after",
        Expect(suspects=SUSPECTS),
        CAUSAL,
        build=_with_mask(_inverted),
        source="https://github.com/InseeFrLab/torchTextClassifiers/pull/92 (the attention mask was inverted)",
    ),
    Case(
        "mask_off_by_one",
        "attention sees the next token too",
        Expect(suspects=SUSPECTS),
        CAUSAL,
        build=_with_mask(_off_by_one),
        source="https://github.com/karpathy/nanoGPT/issues/331 (Bug in Causal Masking Custom Implementation?)",
    ),
    Case(
        "dropout_mask_repeats",
        "a dropout hides the same elements at every step",
        Expect(suspects=(("activation_output", "{dropout}*"),), within=30),
        DROPOUT,
        build=_same_dropout,
        source="https://github.com/Lightning-AI/pytorch-lightning/issues/20412 (the same random numbers again and again)",
    ),
)
