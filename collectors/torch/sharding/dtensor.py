"""FSDP2 (`fully_shard`) and tensor parallelism: each parameter is a DTensor, which stores its placements."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from trainsentry.collectors.series import UNKNOWN_REGION
from trainsentry.collectors.torch.sharding.local_shards import LocalShard
from trainsentry.collectors.torch.sharding.sharding import OuterOptimizer, Sharding


class _DTensor(Sharding):
    name = "fully_shard"
    before_reduction = "in_forward"

    def is_sharded(self, model: nn.Module) -> bool:
        return any(map(_is_managed, model.modules())) or has_dtensors(model)

    def is_data_parallel(self, model: nn.Module) -> bool | None:
        """Return False for tensor parallelism: two sharded dimensions, or DTensors without `fully_shard`."""
        parameters: list[Any] = [x for x in model.parameters() if is_dtensor(x)]
        sharded = [sum(p.is_shard() for p in x.placements) for x in parameters]
        if any(dimensions > 1 for dimensions in sharded):
            return False
        if any(type(m).__name__.startswith("FSDP") for m in model.modules()):
            return True
        return False if sharded else None

    def local_shards(self, model: nn.Module, outer: Sequence[OuterOptimizer]) -> Mapping[int, Sequence[LocalShard]]:
        return {id(p): (LocalShard(p),) for p in model.parameters() if is_dtensor(p)}


DTENSOR = _DTensor()


def is_dtensor(tensor: Any) -> bool:
    """Whether a tensor is a DTensor; does not import torch.distributed."""
    return hasattr(tensor, "placements")


def has_dtensors(model: nn.Module) -> bool:
    """Whether any parameter of a model is a DTensor."""
    return any(map(is_dtensor, model.parameters()))


def region_of(tensor: Any, whole: tuple[int, ...]) -> str:
    """Return the region of a rank's shard of a DTensor, computed as torch's checkpoints do; `whole` is its shape."""
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


def _is_managed(module: Tensor | nn.Module) -> bool:
    return getattr(module, "_is_fsdp_managed_module", False) or type(module).__name__.startswith("FSDP")
