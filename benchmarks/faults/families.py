"""The seven model families of the open list: how each is made, its data, its loss, and the places that a fault harms.

A place is the name of a module or parameter in the family's model, under a word that means the same in all: a fault
says `layer` and harms a linear layer here, a convolution there.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import image_models
import text_models
import torch
from models import Gpt, Images, Text, loss_of
from torch import Tensor, nn
from torch.nn import functional as F

UNSEEN = ("llama", "vit", "diffusion")
"""Families at which nobody looks while rules are made: only their sums are reported, and no word of what was said."""


@dataclass(frozen=True)
class Family:
    """A model, its data and loss, and its places."""

    model: Callable[[], Any]
    data: Callable[[], Any]
    loss: Callable[[Tensor, Tensor], Tensor]
    places: dict[str, str]


def _places(
    first: str, layer: str, twin: str, weight: str = "", other_weight: str = "", **others: str
) -> dict[str, str]:
    weight, other_weight = weight or f"{layer}.weight", other_weight or f"{twin}.weight"
    return {"first": first, "layer": layer, "twin": twin, "weight": weight, "other_weight": other_weight, **others}


def _of_blocks(first: str, **others: str) -> dict[str, str]:
    """Return the places of a transformer whose second block is harmed."""
    named = {"block": "blocks.1", "attention": "blocks.1.attn", "logits": "blocks.1.attn.logits"}
    return _places(first, "blocks.1.mlp.fc1", "blocks.2.mlp.fc1", **{**named, **others})


FAMILIES = {
    "gpt": Family(
        lambda: Gpt(width=32, layers=3),
        Text,
        loss_of,
        _of_blocks("tok", norm="blocks.1.ln2", act="blocks.1.mlp.act", dropout="blocks.1.attn.drop",
                   branch="blocks.1.mlp"),
    ),
    "resnet": Family(
        image_models.ResNet,
        lambda: Images(image_models.DIRECTIONS),
        loss_of,
        _places("stem", "blocks.1.conv1", "blocks.2.conv1", block="blocks.1", branch="blocks.1.norm2",
                norm="blocks.1.norm1", batch_norm="blocks.1.norm1", act="blocks.1.act", dropout="drop",
                buffers="blocks.1.norm1.running_*"),
    ),
    "lstm": Family(
        text_models.Recurrent,
        Text,
        loss_of,
        _places("tok", "layers.0.proj", "layers.1.proj", "layers.0.rnn.weight_hh_l0", "layers.1.rnn.weight_hh_l0",
                block="layers.1", branch="layers.1.proj", norm="layers.1.norm", act="layers.1.act",
                dropout="layers.1.drop"),
    ),
    "moe": Family(
        text_models.Moe,
        Text,
        loss_of,
        _places("tok", "blocks.0.attn.v_proj", "blocks.1.attn.v_proj", block="blocks.1", branch="blocks.1.moe",
                attention="blocks.1.attn", logits="blocks.1.attn.logits", norm="blocks.1.ln2",
                dropout="blocks.1.attn.drop",
                router="blocks.1.moe.router", moe="blocks.1.moe", expert="blocks.1.moe.experts.2",
                buffers="blocks.1.moe.bias"),
    ),
    "llama": Family(
        text_models.Llama,
        Text,
        loss_of,
        _places("tok", "blocks.1.mlp.gate_proj", "blocks.2.mlp.gate_proj", block="blocks.1", branch="blocks.1.mlp",
                attention="blocks.1.attn", logits="blocks.1.attn.logits", norm="blocks.1.norm2", act="blocks.1.mlp.act",
                buffers="blocks.1.attn.*"),
    ),
    "vit": Family(
        image_models.Vit,
        lambda: Images(image_models.DIRECTIONS),
        loss_of,
        _of_blocks("stem", norm="blocks.1.ln2", act="blocks.1.mlp.act", dropout="blocks.1.attn.drop",
                   branch="blocks.1.mlp", batch_norm="stem_norm", buffers="stem_norm.running_*"),
    ),
    "diffusion": Family(
        image_models.Diffusion,
        image_models.NoisedImages,
        F.mse_loss,
        _places("net.into", "net.blocks.1.conv", "net.blocks.2.conv", block="net.blocks.1", branch="net.blocks.1.conv",
                norm="net.blocks.1.norm", act="net.blocks.1.act", dropout="net.blocks.1.drop", buffers="signal"),
    ),
}  # fmt: skip

PLACES = {name: family.places for name, family in FAMILIES.items()}

TEXT = ("gpt", "lstm", "moe", "llama")
CAUSAL = ("gpt", "moe", "llama")
CLASSIFIERS = ("resnet", "vit")
IMAGES = ("resnet", "vit", "diffusion")
ATTENTION = ("gpt", "moe", "llama", "vit")
DROPOUT = ("gpt", "resnet", "lstm", "moe", "vit", "diffusion")
DENSE = ("gpt", "resnet", "lstm", "llama", "vit", "diffusion")
"""All but the mixture of experts, whose idle experts a plain DistributedDataParallel refuses."""

ALL = tuple(FAMILIES)


def each(inputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the inputs, a tensor or a tuple of them, each changed."""
    return tuple(change(t) for t in inputs) if isinstance(inputs, tuple) else change(inputs)


def pixels(inputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the inputs with their first tensor, the images or tokens, changed."""
    return (change(inputs[0]), *inputs[1:]) if isinstance(inputs, tuple) else change(inputs)


def in_bf16(model: nn.Module, is_active: Callable[[], bool]) -> None:
    """Let a model compute in bf16 while `is_active` says so.

    For processors without AVX-512 oneDNN has no LSTM in bf16, and raises an error; torch's own takes its place there.
    """
    whole, has_bf16 = model.forward, torch.ops.mkldnn._is_mkldnn_bf16_supported()

    def forward(*inputs: Any) -> Any:
        active = is_active()
        others = contextlib.nullcontext() if has_bf16 or not active else torch.backends.mkldnn.flags(enabled=False)
        with others, torch.autocast("cpu", torch.bfloat16, enabled=active):
            return whole(*inputs).float()

    model.forward = forward
