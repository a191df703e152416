"""Flips a bit in the storage of one weight, as a cosmic ray or a worn memory cell does."""

import random
from typing import Final

import torch
from torch import Tensor, nn

from trainsentry.monitor.demo.outcome import Flip

BITS: Final = {"flip": (30,), "soft": (25, 26)}
"""Bits of a float32 by kind of fault: bit 30 multiplies a small weight by 2^128, bit 25 by 16, bit 26 by 256."""


def flip_weight(model: nn.Module, tokens: Tensor, kind: str, seed: int, parameter: str | None = None) -> Flip:
    """Set a clear bit of a weight that the next batch (`tokens`) uses.

    Raises:
        ValueError: when the model has no such parameter, or the bit is set in all its elements.

    """
    choice = random.Random(seed)  # noqa: S311 - a fault, not a secret
    named = dict(model.named_parameters())
    if parameter is not None:
        check_parameter(model, parameter)
    names = [parameter] if parameter is not None else choice.sample(list(named), len(named))
    bits = choice.sample(BITS[kind], len(BITS[kind]))
    for name, bit in ((name, bit) for name in names for bit in bits):
        flat = named[name].data.view(-1)  # torch counts no write, as it counts none of faulty memory
        values = flat.cpu()  # the weights themselves may lie on an accelerator
        used = _used_elements(name, named[name], tokens)
        clear = ((values.view(torch.int32) >> bit) & 1 == 0) & (values != 0)
        candidates = [i for i in used if clear[i]] if len(used) < len(flat) else clear.nonzero().flatten().tolist()
        if candidates:
            element = choice.choice(candidates)
            before = float(values[element])
            flat.view(torch.int32)[element] ^= 1 << bit
            return Flip(name, element, bit, before, float(flat[element]))
    raise ValueError(f"--fault-parameter: no used element of {names[0]!r} has bit {bits[0]} clear")


def check_parameter(model: nn.Module, name: str) -> None:
    """Check that the model has a parameter of this name.

    Raises:
        ValueError: when it has none.

    """
    names = [n for n, _ in model.named_parameters()]
    if name not in names:
        raise ValueError(f"--fault-parameter: {name!r} is not a parameter; allowed: {', '.join(names)}")


def _used_elements(name: str, parameter: Tensor, tokens: Tensor) -> list[int]:
    """Return the elements that the next forward pass uses: for the byte embedding only the batch's rows."""
    if name != "token.weight":
        return list(range(parameter.numel()))
    width = parameter.shape[1]
    return [row * width + column for row in set(tokens.flatten().tolist()) for column in range(width)]
