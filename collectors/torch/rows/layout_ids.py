"""Ids of layouts: shape and dtype of a rank's part of a tensor, and the region of the whole that it covers."""

import math
from typing import Any

from torch import Tensor

from trainsentry.collectors.series import UNKNOWN_REGION, Layout, SeriesTable
from trainsentry.collectors.torch.rows.host_statistics import PLAIN
from trainsentry.collectors.torch.sharding.local_shards import Fragment


class LayoutIds:
    """Returns the ids of tensors' layouts, from a dictionary once a layout is known."""

    def __init__(self, table: SeriesTable) -> None:
        self.table = table
        self._plain: dict[tuple[Any, Any], int] = {}
        self._placed: dict[Any, int] = {}

    def of(self, tensor: Tensor) -> int:
        """Return the id of a tensor's layout; of a DTensor, that of its local shard."""
        if type(tensor) not in PLAIN and hasattr(tensor, "placements"):  # checking the type is cheaper
            return self._of_dtensor(tensor)
        if tensor.is_nested:
            return self.table.layout_id(Layout((), _dtype(tensor), tensor.numel()))
        return self.of_plain(tensor)

    def of_plain(self, tensor: Tensor) -> int:
        """Return the id of the layout of a tensor that is neither sharded nor nested."""
        found = self._plain.get((tensor.shape, tensor.dtype))
        if found is None:
            layout = Layout(tuple(int(n) for n in tensor.shape), _dtype(tensor), tensor.numel())
            found = self._plain[tensor.shape, tensor.dtype] = self.table.layout_id(layout)
        return found

    def placed(self, tensor: Tensor, fragment: Fragment | None) -> int | None:
        """Return the id of the layout of this rank's part of a tensor, None when the tensor is not sharded."""
        if fragment is not None:
            return self.of_fragment(fragment, tensor)
        return self._of_dtensor(tensor) if hasattr(tensor, "placements") else None

    def of_fragment(self, fragment: Fragment, tensor: Tensor) -> int:
        """Return the id of the layout of a fragment of `tensor`."""
        key = (fragment, tensor.dtype)
        found = self._placed.get(key)
        if found is None:
            shape = fragment.whole if not fragment.region else (fragment.numel,)
            layout = Layout(shape, _dtype(tensor), fragment.numel, fragment.whole, fragment.region)
            found = self._placed[key] = self.table.layout_id(layout)
        return found

    def _of_dtensor(self, tensor: Any) -> int:
        key = (tensor.shape, tensor.dtype, tensor.placements, id(tensor.device_mesh))
        found = self._placed.get(key)
        if found is None:
            shape = tuple(int(n) for n in tensor.to_local().shape)
            whole = tuple(int(n) for n in tensor.shape)
            layout = Layout(shape, _dtype(tensor), math.prod(shape), whole, _box_of(tensor, whole))
            found = self._placed[key] = self.table.layout_id(layout)
        return found


def _box_of(tensor: Any, whole: tuple[int, ...]) -> str:
    """Return the region that this rank's shard of a DTensor covers, as torch's checkpoints define it."""
    if any(placement.is_partial() for placement in tensor.placements):
        return UNKNOWN_REGION
    chunks = tensor.__create_chunk_list__()
    if len(chunks) > 1:
        return UNKNOWN_REGION
    sizes = tuple(chunks[0].sizes) if chunks else (0,) * len(whole)
    if sizes == whole:
        return ""
    offsets = tuple(chunks[0].offsets) if chunks else (0,) * len(whole)
    return ",".join(f"{start}:{start + size}" for start, size in zip(offsets, sizes, strict=True))


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
