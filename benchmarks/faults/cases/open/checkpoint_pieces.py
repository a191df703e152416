"""A run is resumed in a new model, and a piece of the checkpoint is wrong."""

import torch
from case import Case, Expect
from families import ALL

OF_LAYER = (("parameter", "{layer}.*"), ("parameter", "{weight}"))


def _pieces(run, checkpoint, word):
    name = run.places[word]
    return [k for k in checkpoint["model"] if k.startswith(name + ".")]


def _stale_layer(run, checkpoint):
    for key in _pieces(run, checkpoint, "layer"):
        checkpoint["model"][key] = run.notes["old"]["model"][key]


def _swapped(run, checkpoint):
    for key in _pieces(run, checkpoint, "layer"):
        other = run.places["twin"] + key[len(run.places["layer"]) :]
        model = checkpoint["model"]
        model[key], model[other] = model[other].clone(), model[key].clone()


def _without_buffers(run, checkpoint):
    """Buffers that move are left as a new model has them; others as memory that nobody has written."""
    weights = dict(run.plain.named_parameters())
    for key in [k for k in checkpoint["model"] if k not in weights]:
        if run.family in {"llama", "diffusion"}:
            checkpoint["model"][key] = torch.zeros_like(checkpoint["model"][key])
        else:
            del checkpoint["model"][key]


def _other_order(run, checkpoint):
    """The optimizer's state is loaded by position, and the parameters of a shape come in another order."""
    state, shapes = checkpoint["optimizer"]["state"], {}
    for index, kept in state.items():
        shapes.setdefault(kept["exp_avg"].shape, []).append(index)
    for indices in shapes.values():
        turned = [state[i] for i in indices[1:] + indices[:1]]
        for index, kept in zip(indices, turned, strict=True):
            state[index] = kept


def _without_block(run, checkpoint):
    for key in _pieces(run, checkpoint, "block"):
        del checkpoint["model"][key]


def _averages(run, checkpoint):
    """The averaged weights, here those of the checkpoint before, are loaded for the raw ones."""
    for key, old in run.notes["old"]["model"].items():
        if old.is_floating_point():
            checkpoint["model"][key] = (old + checkpoint["model"][key]) / 2


CASES = (
    Case(
        "stale_layer",
        "one layer comes from the checkpoint before",
        Expect(suspects=OF_LAYER, within=10),
        ALL,
        resume=_stale_layer,
        source="https://github.com/NVIDIA/Megatron-LM/pull/6920 (a run resumed continues from a different model than it saved)",
    ),
    Case(
        "layers_swapped",
        "two layers change places in the checkpoint",
        Expect(suspects=(*OF_LAYER, ("parameter", "{twin}.*")), within=10),
        ALL,
        resume=_swapped,
        source="https://github.com/roytseng-tw/Detectron.pytorch/pull/118 (the order of names lost, shapes differ or not)",
    ),
    Case(
        "buffers_not_loaded",
        "buffers are not loaded",
        Expect(suspects=(("buffer*", "*"), ("activation_output", "*")), within=10),
        ("resnet", "moe", "llama", "vit", "diffusion"),
        resume=_without_buffers,
        source="https://github.com/huggingface/transformers/issues/45902; https://github.com/sgl-project/SpecForge/pull/703",
    ),
    Case(
        "state_in_other_order",
        "the optimizer's state is given to other parameters of the same shape",
        Expect(
            suspects=(("exp_avg*", "*"), ("optimizer*", "*"), ("moment_direction", "*"), ("alignment*", "*")), within=10
        ),
        ALL,
        resume=_other_order,
        source="https://github.com/facebookresearch/fairscale/issues/380; https://github.com/pytorch/pytorch/pull/105958",
    ),
    Case(
        "block_not_loaded",
        "a block keeps its random weights, since missing keys are allowed",
        Expect(suspects=(("parameter", "{block}.*"),), within=10),
        ALL,
        resume=_without_block,
        source="https://github.com/rosinality/stylegan2-pytorch/issues/26; https://github.com/pytorch/pytorch/pull/18668",
    ),
    Case(
        "averages_loaded",
        "averaged weights are loaded for the raw ones",
        Expect(suspects=(("parameter", "*"),), within=10),
        ALL,
        resume=_averages,
        source="https://github.com/atomistic-machine-learning/schnetpack/pull/785; https://github.com/Megvii-BaseDetection/YOLOX/issues/1318",
    ),
)
