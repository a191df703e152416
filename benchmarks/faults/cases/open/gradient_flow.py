"""Gradients are cut, doubled, kept or clipped at the wrong time."""

import torch
from case import Case, Expect
from families import ALL

WHOLE = (("training", "*"), ("gradient*", "*"), ("optimizer*", "*"))


def _detached(run):
    def hook(module, args, output):
        return output.detach().requires_grad_() if run.harmed else output

    run.place("branch").register_forward_hook(hook)


def _doubled(run):
    run.place("weight").register_hook(lambda g: g * 2 if run.harmed else g)


def _kept(run):
    run.zeroes = not run.harmed


def _scaled(run):
    run.scaler, run.clip = torch.amp.GradScaler("cpu", init_scale=1024.0), 0.3


def _clips_scaled(run):
    run.clips_scaled = run.harmed


def _twice(run, loss):
    if run.harmed:
        loss.backward(retain_graph=True)
    return loss


def _wrong_derivative(run):
    """A new kernel of an activation whose backward pass lets everything through."""

    def hook(module, args, output):
        return args[0] + (output - args[0]).detach() if run.harmed else output

    run.place("act").register_forward_hook(hook)


def _clipped(run):
    run.clip = 0.1


def _unclipped(run):
    if run.at_fault:
        run.clip = None


def _accumulates(run):
    run.accumulation = 4


def _only_the_last(run, inputs, targets):
    """Gradients are zeroed before every micro-step."""
    if run.harmed:
        run.optimizer.zero_grad()
    return inputs, targets


CASES = (
    Case(
        "branch_detached",
        "a branch's output is detached",
        Expect(suspects=(("gradient*", "{branch}*"), ("update", "{branch}*"), ("activation_grad*", "{branch}*"))),
        ALL,
        build=_detached,
        source="https://github.com/queenie88/A-GCN/issues/4; https://github.com/noegroup/bgflow/issues/14",
    ),
    Case(
        "gradient_doubled",
        "one weight's gradient is doubled",
        Expect(suspects=(("gradient*", "{weight}"),)),
        ALL,
        build=_doubled,
        source="https://github.com/pytorch/pytorch/issues/160285 (each gradient is exactly 2x in size)",
    ),
    Case(
        "gradients_kept",
        "gradients are not zeroed",
        Expect(suspects=WHOLE),
        ALL,
        after_update=_kept,
        source="https://github.com/meta-pytorch/torchforge/pull/71; https://github.com/pytorch/pytorch/issues/47175",
    ),
    Case(
        "clipped_before_unscaled",
        "gradients are clipped before they are unscaled",
        Expect(suspects=(*WHOLE, ("update", "*"))),
        ALL,
        prepare=_scaled,
        before_update=_clips_scaled,
        source="https://github.com/milesial/Pytorch-UNet/issues/468; https://github.com/victorchall/EveryDream2trainer/pull/175",
    ),
    Case(
        "backward_twice",
        "the backward pass runs twice",
        Expect(suspects=WHOLE),
        ALL,
        loss=_twice,
        source="https://github.com/huggingface/accelerate/issues/113 (unscaled twice); https://github.com/pytorch/pytorch/issues/160285 (doubled)",
    ),
    Case(
        "wrong_derivative",
        "an activation's backward pass is that of the identity",
        Expect(suspects=(("activation_grad*", "{act}*"), ("gradient*", "{block}*"), ("gradient*", "{layer}*"))),
        ("gpt", "resnet", "lstm", "llama", "vit", "diffusion"),
        build=_wrong_derivative,
        source="https://github.com/pytorch/pytorch/issues/193279; https://github.com/pytorch/pytorch/issues/31258",
    ),
    Case(
        "clipping_lost",
        "gradients are no longer clipped",
        Expect(suspects=WHOLE),
        ALL,
        prepare=_clipped,
        before_step=_unclipped,
        source="https://github.com/huggingface/accelerate/pull/88 (clipping that a wrapper leaves out)",
    ),
    Case(
        "micro_steps_lost",
        "of four micro-steps only the last counts",
        Expect(suspects=WHOLE),
        ALL,
        prepare=_accumulates,
        batch=_only_the_last,
        source="https://github.com/tatsu-lab/alpaca_farm/issues/57; https://github.com/huggingface/accelerate/issues/616",
    ),
)
