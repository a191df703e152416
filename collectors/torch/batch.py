"""Tensors that are read together, and what a rank holds of each."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from trainsentry.collectors.torch.fragment import Fragment
from trainsentry.collectors.torch.layout_ids import LayoutIds
from trainsentry.collectors.torch.local_tensor import local


@dataclass(frozen=True, slots=True)
class Batch:
    """Tensors that are read in one way: what this rank holds of each, and what their rows are divided by."""

    ids: Sequence[int]
    tensors: Sequence[Tensor]
    layouts: Sequence[int | None]
    divisor: Tensor | None
    norms: Tensor | None


def take_held(
    tensors: list[Tensor], fragments: Sequence[Fragment | None], layouts: list[int | None], ids: LayoutIds
) -> None:
    """Put what this rank holds in the place of sharded tensors, and note the place it has in the whole."""
    for i, (tensor, fragment) in enumerate(zip(tensors, fragments, strict=True)):
        if fragment is not None:
            tensors[i] = fragment.of(local(tensor))
            layouts[i] = ids.of_fragment(fragment, tensors[i])
        elif hasattr(tensor, "placements"):
            layouts[i] = ids.of(tensor)
            tensors[i] = local(tensor)
