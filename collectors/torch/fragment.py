"""A rank's part of a parameter that lies in a flat tensor together with others, as FSDP1 and ZeRO store them."""

import math
from dataclasses import dataclass

from torch import Tensor


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
