"""Seeds MindSpore's random numbers, so that two runs draw the same."""

import os
from typing import Any, Final

import mindspore as ms
from mindspore import Tensor, mint, nn, ops
from mindspore.ops import Primitive

RM_DROPOUT: Final = False
"""The default of `rm_dropout` that msprobe documents for MindSpore's dumps."""


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
        ops.Dropout.__call__ = _keep_all
        for primitive in (ops.Dropout2D, ops.Dropout3D):
            primitive.__call__ = _keep_all_channels
        for cell in (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, mint.nn.Dropout):
            cell.construct = _construct


def _pass_on(input: Tensor, *_: object, **__: object) -> Tensor:  # noqa: A002 - the name that callers use
    return input


def _keep_all(self: Primitive, x: Tensor) -> Any:
    """Call `ops.Dropout`, which returns the input and a mask of ones when it keeps everything."""
    return Primitive.__call__(self, x, 1.0, self.Seed0, self.Seed1)


def _keep_all_channels(self: Primitive, x: Tensor) -> Any:
    self.add_prim_attr("keep_prob", 1.0)
    return Primitive.__call__(self, x)


def _construct(self: nn.Cell, x: Tensor) -> Tensor:  # noqa: ARG001 - a cell's method
    return x
