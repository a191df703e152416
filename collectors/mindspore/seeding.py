"""Seeds MindSpore's random numbers, so that two runs draw the same."""

import os

import mindspore as ms
from mindspore import Tensor, mint, nn, ops


def seed_framework(seed: int, mode: bool, rm_dropout: bool) -> None:
    """Seed MindSpore; `mode` chooses deterministic algorithms, `rm_dropout` makes dropout return its input.

    An existing `nn.Dropout` cell is not reseeded: MindSpore 2.10 seeds each cell when it is created.
    """
    ms.set_seed(seed)
    if mode:
        os.environ["HCCL_DETERMINISTIC"] = "true"
        ms.set_deterministic(True)
    if rm_dropout:
        for module in (ops, mint.nn.functional):
            for name in ("dropout", "dropout1d", "dropout2d", "dropout3d"):
                if hasattr(module, name):
                    setattr(module, name, _pass_on)
        for cell in (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, mint.nn.Dropout):
            cell.construct = _construct


def _pass_on(input: Tensor, *_: object, **__: object) -> Tensor:  # noqa: A002 - the name that callers use
    return input


def _construct(self: nn.Cell, x: Tensor) -> Tensor:  # noqa: ARG001 - a cell's method
    return x
