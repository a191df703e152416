"""A parameter's name, and the part of it that lies on this rank: all of it, a shard, or a fragment of a flat tensor."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from trainsentry.collectors.torch.sharding.sharding import Sharding


@dataclass(frozen=True, slots=True)
class Fragment:
    """Elements `start` to `start + numel` of a flat tensor, which are those from `offset` on of the flattened whole.

    `whole` is the parameter's own shape. A parameter of which this rank holds nothing has `numel` 0. Where the
    parameter object itself is the rank's part, `start` is 0 and the flat tensor is that object.
    """

    start: int
    numel: int
    offset: int
    whole: tuple[int, ...]

    @property
    def region(self) -> str:
        """The part of the whole, as layouts write it."""
        return "" if self.numel == math.prod(self.whole) else f"{self.offset}:{self.offset + self.numel}"

    def of(self, flat: Tensor) -> Tensor:
        """Return the fragment of a flat tensor, or of one as long as it (its gradient, a tensor of its state)."""
        return flat.detach().reshape(-1).narrow(0, self.start, self.numel)


@dataclass(frozen=True, slots=True)
class LocalShard:
    """What a rank holds of a parameter: `parameter` is what the optimizer moves, all of it or a `fragment`.

    `name` is the parameter's name inside its unit where a flat parameter holds several. `owner` is the model's own
    parameter where the optimizer moves another.
    """

    parameter: nn.Parameter
    fragment: Fragment | None = None
    name: str = ""
    owner: nn.Parameter | None = None


@dataclass(frozen=True)
class NamedParameter:
    """A parameter with its clean name, the module that owns it, and its model chunk.

    `parameter` is what the optimizer moves: the model's own parameter, or a flat tensor that holds a `fragment` of
    it together with others. `owner` is the model's own parameter where that is another. `sharding` is None where every
    rank holds the whole.
    """

    name: str
    parameter: nn.Parameter
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
        return self.parameter if self.owner is None else self.owner

    def part_of(self, flat: Tensor) -> Tensor:
        """Return this parameter's part of a tensor that is laid out like `parameter`."""
        return flat if self.fragment is None else self.fragment.of(flat)
