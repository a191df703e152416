"""A parameter's name and its part on this rank: the whole, a shard, or a fragment of a flat tensor."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from torch import Tensor, nn

if TYPE_CHECKING:
    from trainsentry.collectors.torch.sharding.sharding import Sharding


@dataclass(frozen=True, slots=True)
class Fragment:
    """A parameter's elements in a flat tensor: `numel` elements from `start` on, from `offset` on in the whole.

    `whole` is the shape of the whole parameter; `offset` counts in its flattened elements. `numel` is 0 where this rank
    has no part of it. Where the parameter object itself is the rank's part, it is the flat tensor, and `start` is 0.
    """

    start: int
    numel: int
    offset: int
    whole: tuple[int, ...]

    @property
    def region(self) -> str:
        """The region of the whole, as in `Layout.region`."""
        return "" if self.numel == math.prod(self.whole) else f"{self.offset}:{self.offset + self.numel}"

    def of(self, flat: Tensor) -> Tensor:
        """Return the fragment of the flat tensor, or of its gradient or state tensor of the same length."""
        return flat.detach().reshape(-1).narrow(0, self.start, self.numel)


@dataclass(frozen=True, slots=True)
class LocalShard:
    """A rank's part of a parameter: the tensor `parameter` that the optimizer updates, or a `fragment` of it.

    It is the model's own parameter, a flat tensor, or an fp32 master.

    `name` is the parameter's name inside its unit where a flat parameter contains several. `owner` is the model's own
    parameter where the optimizer updates another tensor.
    """

    parameter: Tensor
    fragment: Fragment | None = None
    name: str = ""
    owner: nn.Parameter | None = None


@dataclass(frozen=True)
class NamedParameter:
    """A parameter with its clean name, the module that owns it, and its model chunk.

    The optimizer updates `parameter`: the model's own parameter, an fp32 master, or a flat tensor with a `fragment` of
    it. `owner` is
    the model's own parameter where that is another tensor. `sharding` is None where every rank has the whole.
    """

    name: str
    parameter: Tensor
    module: str
    vpp_stage: int
    fragment: Fragment | None = None
    owner: nn.Parameter | None = None
    sharding: "Sharding | None" = None

    @property
    def leaf(self) -> str:
        """The parameter's name inside its module."""
        return self.name.rpartition(".")[2]

    @property
    def own(self) -> nn.Parameter:
        """The model's own parameter, which takes part in the forward pass."""
        return self.owner if self.owner is not None else cast("nn.Parameter", self.parameter)

    @property
    def accumulates(self) -> bool:
        """Whether `own.grad` holds this rank's gradient as it accumulates, before any reduction."""
        return self.sharding is None or self.sharding.before_reduction == "accumulated"

    def part_of(self, flat: Tensor) -> Tensor:
        """Return this parameter's part of a tensor with the layout of `parameter`."""
        return flat if self.fragment is None else self.fragment.of(flat)
