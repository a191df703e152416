"""What a rank holds of sharded tensors, and the ids of layouts that say which part of the whole it is."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from trainsentry.collectors.series import Layout, SeriesTable
from trainsentry.collectors.torch.rows.local_tensor import local
from trainsentry.collectors.torch.sharding.dtensor import is_dtensor, region_of
from trainsentry.collectors.torch.sharding.local_shards import Fragment


class ShardLayouts:
    """Gives shards the ids of their layouts; each is looked up once."""

    def __init__(self, table: SeriesTable) -> None:
        self.table = table
        self._ids: dict[Any, int] = {}

    def of(self, tensor: Tensor, fragment: Fragment | None) -> int | None:
        """Return the id of the layout of a rank's part of a tensor, None for a tensor that is not sharded."""
        if fragment is not None:
            return self.of_fragment(fragment, tensor)
        return self.of_dtensor(tensor) if is_dtensor(tensor) else None

    def of_fragment(self, fragment: Fragment, tensor: Tensor) -> int:
        """Return the id of the layout of a fragment of `tensor`."""
        key = (fragment, tensor.dtype)
        found = self._ids.get(key)
        if found is None:
            shape = fragment.whole if not fragment.region else (fragment.numel,)
            layout = Layout(shape, dtype_name(tensor), fragment.numel, fragment.whole, fragment.region)
            found = self._ids[key] = self.table.layout_id(layout)
        return found

    def of_dtensor(self, tensor: Any) -> int:
        """Return the id of the layout of a DTensor's local shard."""
        key = (tensor.shape, tensor.dtype, tensor.placements, id(tensor.device_mesh))
        found = self._ids.get(key)
        if found is None:
            shape = tuple(int(n) for n in tensor.to_local().shape)
            whole = tuple(int(n) for n in tensor.shape)
            layout = Layout(shape, dtype_name(tensor), math.prod(shape), whole, region_of(tensor, whole))
            found = self._ids[key] = self.table.layout_id(layout)
        return found


def take_local_parts(
    tensors: list[Tensor], fragments: Sequence[Fragment | None], layouts: list[int | None], ids: ShardLayouts
) -> None:
    """Replace sharded tensors by this rank's part of them, and note the layout of each part."""
    for i, (tensor, fragment) in enumerate(zip(tensors, fragments, strict=True)):
        if fragment is not None:
            tensors[i] = fragment.of(local(tensor))
            layouts[i] = ids.of_fragment(fragment, tensors[i])
        elif is_dtensor(tensor):
            layouts[i] = ids.of_dtensor(tensor)
            tensors[i] = local(tensor)


def dtype_name(tensor: Tensor) -> str:
    """Return a dtype as layouts write it."""
    return str(tensor.dtype).removeprefix("torch.")
