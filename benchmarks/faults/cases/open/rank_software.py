"""One rank runs another version, or other settings."""

import torch
from case import Case, Expect
from families import DENSE, DROPOUT, IMAGES, in_bf16, pixels
from torch import nn

NO_EXPERTS = tuple(f for f in DROPOUT if f in DENSE)
RANK_1 = 1


def _quick_gelu(run):
    """CLIP's approximation for the exact function."""

    def hook(module, args, output):
        return args[0] * torch.sigmoid(1.702 * args[0]) if run.harmed and run.rank == RANK_1 else output

    for module in run.plain.modules():
        if isinstance(module, (nn.GELU, nn.SiLU)):
            module.register_forward_hook(hook)


def _dropout(run):
    if run.at_fault and run.rank == RANK_1:
        for module in run.plain.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.5


def _autocast(run):
    in_bf16(run.plain, lambda: run.harmed and run.rank == RANK_1)


def _preprocessing(run, inputs, targets):
    if run.harmed and run.rank == RANK_1:
        inputs = pixels(inputs, lambda x: 1.3 * x + 0.4)
    return inputs, targets


def _other_loss(run, loss):
    return loss * 1.5 if run.harmed and run.rank == RANK_1 else loss


CASES = (
    Case(
        "rank_quick_gelu",
        "one rank computes another GELU",
        Expect(suspects=(("activation_output", "*act*"),), within=30),
        ("gpt", "lstm", "vit"),
        ranks=2,
        build=_quick_gelu,
        source="https://github.com/mlfoundations/open_clip/issues/771; https://github.com/huggingface/pytorch-image-models/issues/2031",
    ),
    Case(
        "rank_dropout",
        "one rank drops half",
        Expect(suspects=(("activation_output", "*drop*"), ("training", "*")), rank=1),
        NO_EXPERTS,
        ranks=2,
        before_step=_dropout,
        source="https://github.com/unslothai/unsloth/pull/11238 (dropout modules in another mode than their wrapper, under DDP)",
    ),
    Case(
        "rank_autocast",
        "one rank computes in bf16",
        Expect(suspects=(("activation_*", "*"), ("training", "*")), rank=1),
        DENSE,
        ranks=2,
        build=_autocast,
        source="https://github.com/meta-pytorch/torchtune/issues/2254 (runs in bf16 part from runs in float32)",
    ),
    Case(
        "rank_preprocessing",
        "one rank's images are normalised by other numbers",
        Expect(suspects=(("data", "*"), ("activation_input", "{first}.input*")), rank=1),
        IMAGES,
        ranks=2,
        batch=_preprocessing,
        source="https://github.com/rmaphoh/RETFound/issues/53 (inconsistency in image normalization between versions)",
    ),
    Case(
        "rank_loss_weight",
        "one rank weighs its loss by another number",
        Expect(suspects=(("training", "*"), ("gradient_unreduced", "*"), ("communication_input", "*")), rank=1),
        DENSE,
        ranks=2,
        loss=_other_loss,
        source="https://github.com/huggingface/transformers/pull/46204 (the loss is divided by another count of items)",
    ),
)
