"""FSDP1 (`FullyShardedDataParallel`): each unit keeps the rank's parts of its parameters in one flat tensor.

No public function returns their places, so private tables are read, and checked; they are the same in torch 2.1 to
2.13.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainsentry.collectors.torch.sharding.local_shards import Fragment, LocalShard
from trainsentry.collectors.torch.sharding.sharding import BeforeReduction, OuterOptimizer, Sharding


class _Fsdp1(Sharding):
    name = "FullyShardedDataParallel"
    name_parts = frozenset({"_fsdp_wrapped_module"})
    holders = frozenset({"FullyShardedDataParallel"})
    held_as = "_fsdp_wrapped_module"
    before_reduction: BeforeReduction = "in_forward"

    def local_shards(self, model: nn.Module, outer: Sequence[OuterOptimizer]) -> Mapping[int, Sequence[LocalShard]]:
        """Return the fragments of flat parameters, and of original parameters (`use_orig_params=True`)."""
        found = _originals(model)
        for parameter in model.parameters():
            if _is_flat(parameter):
                found[id(parameter)] = [LocalShard(parameter, part, name) for name, part in _inside(parameter)]
        return found

    def in_forward(self, module: nn.Module, leaf: str) -> Tensor | None:
        tensor = super().in_forward(module, leaf)
        return None if tensor is None or _is_flat(tensor) else tensor


FSDP1 = _Fsdp1()


def _is_flat(parameter: Tensor) -> bool:
    """Whether a parameter is flat, and contains others (`use_orig_params=False`)."""
    return bool(getattr(parameter, "_is_flat_param", False))


def _inside(flat: Any) -> Iterator[tuple[str, Fragment]]:
    """Yield the name within its unit, and the rank's fragment, of each parameter in a flat one.

    Raises:
        RuntimeError: when the flat parameter has an unknown layout.

    """
    for info, shard, shape in _entries(flat):
        name = f"{info.module_name}.{info.param_name}" if info.module_name else info.param_name
        if not shard.in_shard:
            yield name, Fragment(0, 0, 0, tuple(shape))
            continue
        fragment = Fragment(shard.offset_in_shard, shard.numel_in_shard, shard.intra_param_start_idx, tuple(shape))
        if fragment.start + fragment.numel > flat.numel():
            raise _unexpected(f"{name} ends after the {flat.numel()} elements of its shard")
        yield name, fragment


def _originals(model: nn.Module) -> dict[int, Sequence[LocalShard]]:
    """Map the id of each original parameter object to its fragment."""
    found: dict[int, Sequence[LocalShard]] = {}
    for unit in _units(model):
        flat = unit._handle.flat_param if unit._handle is not None else None
        for parameter, (_, shard, shape) in zip(getattr(flat, "_params", None) or (), _entries(flat), strict=False):
            numel = shard.numel_in_shard if shard.in_shard else 0
            if numel != parameter.numel():
                raise _unexpected(f"a parameter has {parameter.numel()} elements instead of {numel}")
            fragment = Fragment(0, numel, shard.intra_param_start_idx if numel else 0, tuple(shape))
            found[id(parameter)] = [LocalShard(parameter, fragment)]
    return found


def _units(model: nn.Module) -> list[Any]:
    if not torch.distributed.is_available():
        return []
    from torch.distributed.fsdp import FullyShardedDataParallel

    return [m for m in model.modules() if isinstance(m, FullyShardedDataParallel)]


def _entries(flat: Any) -> list[tuple[Any, Any, Any]]:
    if flat is None:
        return []
    try:
        infos, shards, shapes = flat._param_infos, flat._shard_param_infos, flat._shapes
    except AttributeError as error:
        raise _unexpected(str(error)) from error
    if not len(infos) == len(shards) == len(shapes):
        raise _unexpected(f"{len(infos)} parameters, {len(shards)} shards, {len(shapes)} shapes")
    return list(zip(infos, shards, shapes, strict=True))


def _unexpected(what: str) -> RuntimeError:
    return RuntimeError(
        f"watch(model): FullyShardedDataParallel of torch {torch.__version__} has an unknown layout ({what}); "
        "allowed: use_orig_params=True with torch 2.1 to 2.13, or fully_shard"
    )
