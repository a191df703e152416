"""The loader gives something else than it should."""

import torch
from case import Case, Expect
from families import ALL, CLASSIFIERS, IMAGES, TEXT, each, pixels
from models import Text

INPUT = (("data", "*"), ("activation_input", "{first}.input*"))


def _stuck(run, inputs, targets):
    if run.harmed:
        return run.notes.setdefault("batch", (inputs, targets))
    return inputs, targets


def _corrupt_shard(run, inputs, targets):
    """Every fourth batch comes from the worker whose shard is garbage: its second half was never written."""
    if run.harmed and (run.step - run.fault_step) % 4 == 0:
        half = run.size // 2
        inputs = pixels(inputs, lambda x: torch.cat([x[:half], torch.zeros_like(x[half:])]))
    return inputs, targets


def _sorted(run, inputs, targets):
    """All images of a batch show the same direction, as in folders read one after the other."""
    if run.harmed:
        label = run.step // 4 % run.data.directions
        found = [run.data.batch(run.size * run.data.directions, run.generator) for _ in range(2)]
        inputs, targets = (torch.cat(part) for part in zip(*found, strict=True))
        chosen = (targets == label).nonzero().flatten()[: run.size]
        return inputs[chosen], targets[chosen]
    return inputs, targets


def _normalised_twice(run, inputs, targets):
    if run.harmed:
        inputs = pixels(inputs, lambda x: (x - 0.45) / 0.225)
    return inputs, targets


def _duplicated(run, inputs, targets):
    """All four workers drew the same: a batch is four times a quarter of it."""
    if run.harmed:
        quarter = run.size // 4

        def change(x):
            return x[:quarter].repeat(4, *[1] * (x.dim() - 1))

        return each(inputs, change), change(targets)
    return inputs, targets


def _truncated(run, inputs, targets):
    if run.harmed:
        inputs, targets = inputs.clone(), targets.clone()
        inputs[:, 12:], targets[:, 12:] = 0, 0
    return inputs, targets


class Padded(Text):
    """Sequences of 12 to 32 tokens, padded with token 0, whose targets are ignored."""

    def batch(self, size, generator):
        """Return inputs and targets, shape (size, length) each."""
        inputs, targets = super().batch(size, generator)
        ends = torch.randint(12, self.length + 1, (size, 1), generator=generator)
        padding = torch.arange(self.length) >= ends
        return inputs.masked_fill(padding, 0), targets.masked_fill(padding, -100)


def _padded(run):
    run.data = Padded()


def _padding_counts(run, inputs, targets):
    return inputs, targets.clamp(min=0) if run.harmed else targets


def _transposed(run, inputs, targets):
    return (inputs.transpose(2, 3) if run.harmed else inputs), targets


CASES = (
    Case(
        "stuck_loader",
        "the loader gives one batch again and again",
        Expect(suspects=INPUT),
        ALL,
        batch=_stuck,
        source="https://github.com/ZhaoJ9014/face.evoLVe/pull/39 (fix iter bug); https://github.com/NVIDIA/DALI/issues/2018",
    ),
    Case(
        "corrupt_shard",
        "one of four workers gives batches that are half zeros",
        Expect(suspects=INPUT),
        ALL,
        batch=_corrupt_shard,
        source="https://github.com/cvlab-columbia/zero123/issues/33 (invalid samples); https://github.com/pytorch/torchtitan/pull/1290",
    ),
    Case(
        "sorted_batches",
        "shuffling is lost: a batch is all of one class",
        Expect(suspects=(*INPUT, ("loss", "*"))),
        CLASSIFIERS,
        batch=_sorted,
        source="https://github.com/pytorch/pytorch/issues/31771; https://github.com/jingyaogong/minimind/pull/503 (shuffle lost)",
    ),
    Case(
        "normalised_twice",
        "images are normalised twice",
        Expect(suspects=INPUT),
        IMAGES,
        batch=_normalised_twice,
        source="https://github.com/soumith/imagenet-multiGPU.torch/pull/18 (Do not normalize images two times)",
    ),
    Case(
        "duplicated_samples",
        "each sample is four times in a batch",
        Expect(suspects=INPUT),
        ALL,
        batch=_duplicated,
        source="https://github.com/facebookresearch/fairseq/issues/1383; https://github.com/pytorch/pytorch/issues/5059",
    ),
    Case(
        "truncated_sequences",
        "sequences are cut at 12 tokens and the padding counts",
        Expect(suspects=(*INPUT, ("loss", "*"))),
        TEXT,
        batch=_truncated,
        source="https://github.com/lm-sys/FastChat/issues/1289 (mismatched samples are masked or cut silently)",
    ),
    Case(
        "padding_in_loss",
        "padding counts in the loss",
        Expect(suspects=(*INPUT, ("loss", "*"))),
        TEXT,
        prepare=_padded,
        batch=_padding_counts,
        source="https://github.com/mlfoundations/open_clip/pull/316; https://github.com/01-ai/Yi/issues/110",
    ),
    Case(
        "transposed_images",
        "images come with height and width exchanged",
        Expect(suspects=(*INPUT, ("loss", "*"))),
        CLASSIFIERS,
        batch=_transposed,
        source="https://github.com/XiaLiPKU/EMANet/issues/7 (wrong preprocessing that raises no error)",
    ),
)
