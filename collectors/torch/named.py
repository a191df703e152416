"""A parameter with its name."""

from dataclasses import dataclass

from torch import Tensor, nn

from trainsentry.collectors.torch.fragment import Fragment


@dataclass(frozen=True)
class NamedParameter:
    """A parameter with its clean name, the module that owns it, and its model chunk.

    `parameter` is what the optimizer moves: the model's own parameter, or a flat tensor that holds a `fragment` of
    it together with others. `owner` is the model's own parameter where that is another.
    """

    name: str
    parameter: nn.Parameter
    module: str
    vpp_stage: int
    fragment: Fragment | None = None
    owner: nn.Parameter | None = None

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
