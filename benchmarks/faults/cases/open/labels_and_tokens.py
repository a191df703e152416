"""Labels do not belong to their inputs, or tokens are those of another vocabulary."""

import torch
from case import Case, Expect
from families import ALL, CLASSIFIERS, TEXT

WRONG = (("data", "*"), ("activation_input", "{first}.input*"), ("loss", "*"))
VOCABULARY = 64


def _mismatched(run, inputs, targets):
    return inputs, targets.roll(1, 0) if run.harmed else targets


def _shifted_twice(run, inputs, targets):
    return inputs, targets.roll(-1, -1) if run.harmed else targets


def _other_tokenizer(run, inputs, targets):
    if run.harmed:
        other = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(11))
        return other[inputs], other[targets]
    return inputs, targets


def _unknown(run, inputs, targets):
    """Words that a smaller vocabulary lacks become token 1."""
    if run.harmed:
        return inputs.masked_fill(inputs >= VOCABULARY // 2, 1), targets.masked_fill(targets >= VOCABULARY // 2, 1)
    return inputs, targets


def _class_map(run, inputs, targets):
    """Folders are read in another order: classes 1 and 5 change places."""
    if run.harmed:
        order = torch.tensor([0, 5, 2, 3, 4, 1, 6, 7])
        return inputs, order[targets]
    return inputs, targets


CASES = (
    Case(
        "mismatched_pairs",
        "each sample has its neighbour's label",
        Expect(suspects=WRONG),
        ALL,
        batch=_mismatched,
        source="https://github.com/NVIDIA-BioNeMo/bionemo-recipes/pull/1449 (inputs and labels jumbled by the collator)",
    ),
    Case(
        "labels_shifted_twice",
        "labels are shifted twice",
        Expect(suspects=WRONG),
        TEXT,
        batch=_shifted_twice,
        source="https://github.com/LLM360/amber-train/issues/6; https://github.com/huggingface/transformers/pull/44642",
    ),
    Case(
        "other_tokenizer",
        "tokens are numbered by another vocabulary",
        Expect(suspects=WRONG),
        TEXT,
        batch=_other_tokenizer,
        source="https://github.com/huggingface/transformers/issues/27583; https://github.com/lm-sys/FastChat/issues/470",
    ),
    Case(
        "unknown_tokens",
        "half of the vocabulary becomes the unknown token",
        Expect(suspects=WRONG),
        TEXT,
        batch=_unknown,
        source="https://github.com/thinking-machines-lab/tinker-feedback/issues/138 (tokenizer and model disagree on the vocabulary)",
    ),
    Case(
        "classes_renumbered",
        "two classes change their numbers",
        Expect(suspects=WRONG),
        CLASSIFIERS,
        batch=_class_map,
        source="https://github.com/pytorch/vision/issues/714; https://github.com/ultralytics/ultralytics/issues/13936",
    ),
)
