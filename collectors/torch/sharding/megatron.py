"""Megatron-core: gradients accumulate in `main_grad`, and its optimizers update fp32 masters or shards of them.

Its `DistributedOptimizer` keeps this rank's part of each parameter in a flat fp32 tensor. No public function returns
their places, so private tables are read. Known: 0.9 to 0.16.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainsentry.collectors.torch.sharding.local_shards import Fragment, LocalShard
from trainsentry.collectors.torch.sharding.sharding import BeforeReduction, OuterOptimizer, Sharding


class _Megatron(Sharding):
    name = "Megatron"
    library = "megatron"
    holders = frozenset({"DistributedDataParallel", "Float16Module"})
    before_reduction: BeforeReduction = "on_owner"  # `main_grad` takes the gradient over, and empties `grad`

    def is_data_parallel(self, model: nn.Module) -> bool | None:
        if any(getattr(p, "tensor_model_parallel", False) for p in model.parameters()):
            return False
        return super().is_data_parallel(model)

    def local_shards(self, model: nn.Module, outer: Sequence[OuterOptimizer]) -> Mapping[int, Sequence[LocalShard]]:
        found: dict[int, Sequence[LocalShard]] = {}
        owners = {id(parameter): parameter for parameter in model.parameters()}
        for each in outer:
            if each.sharding is self:
                for owner, shard in _parts(each.optimizer):
                    if id(owner) in owners:
                        found[id(owner)] = (shard,)
        return found

    def inner_optimizer(self, optimizer: Any) -> Optimizer | None:
        inner = getattr(optimizer, "optimizer", None) if _is_megatron(optimizer) else None
        return inner if isinstance(inner, Optimizer) else None

    def loss_scale(self, optimizer: Any) -> float | Tensor:
        scale: float | Tensor = optimizer.get_loss_scale()
        return scale

    def adapts_loss_scale(self, optimizer: Any) -> bool:
        return hasattr(getattr(optimizer, "grad_scaler", None), "backoff_factor")

    def reduced_gradients(self, optimizer: Any) -> dict[int, Tensor]:
        if getattr(optimizer, "grad_scaler", None) is None:  # without one no step is refused
            return {}
        found = {}
        for owner, shard in _parts(optimizer):
            gradient = getattr(owner, "main_grad", owner.grad)
            if gradient is not None:
                part = shard.fragment
                found[id(owner)] = gradient if part is None else _slice(gradient, part)
        return found


MEGATRON = _Megatron()


def _is_megatron(optimizer: Any) -> bool:
    return any(
        c.__name__ == "MegatronOptimizer" and c.__module__.partition(".")[0] == MEGATRON.library
        for c in type(optimizer).__mro__
    )


def _parts(optimizer: Any) -> Iterator[tuple[nn.Parameter, LocalShard]]:
    """Yield each of the model's parameters that the optimizer is in charge of, with its part on this rank.

    Raises:
        RuntimeError: when the tables have an unknown layout.

    """
    try:
        if hasattr(optimizer, "model_float16_groups"):
            yield from _sharded(optimizer)
        elif hasattr(optimizer, "fp32_from_float16_groups"):
            yield from _whole(optimizer)
        else:
            for group in optimizer.optimizer.param_groups:
                yield from ((parameter, LocalShard(parameter)) for parameter in group["params"])
    except (AttributeError, KeyError, TypeError) as error:
        kind = type(optimizer).__name__
        raise RuntimeError(f"watch(optimizer): this version of Megatron's {kind} is unknown: {error!r}") from error


def _whole(optimizer: Any) -> Iterator[tuple[nn.Parameter, LocalShard]]:
    """Yield whole parameters, half-precision ones with their fp32 masters (`Float16OptimizerWithFloat16Params`)."""
    for owners, masters in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True):
        for owner, master in zip(owners, masters, strict=True):
            yield owner, LocalShard(master, owner=owner)
    for group in optimizer.fp32_from_fp32_groups:
        yield from ((parameter, LocalShard(parameter)) for parameter in group)


def _sharded(optimizer: Any) -> Iterator[tuple[nn.Parameter, LocalShard]]:
    """Yield parameters with this rank's flat part of them (`DistributedOptimizer`); other ranks' parts are empty."""
    here = set()
    for owners, shards in (
        *_half(optimizer),
        *zip(optimizer.model_fp32_groups, optimizer.shard_fp32_groups, strict=True),
    ):
        for owner, shard in zip(owners, shards, strict=True):
            place = optimizer._get_model_param_range_map(owner)["param"]
            here.add(id(owner))
            fragment = Fragment(0, place.end - place.start, place.start, tuple(owner.shape))
            yield owner, LocalShard(shard, fragment, owner=owner)
    for buffer in optimizer.buffers:
        for owner in buffer.params:
            if id(owner) not in here:
                nothing = torch.empty(0, device=owner.device)
                yield owner, LocalShard(nothing, Fragment(0, 0, 0, tuple(owner.shape)), owner=owner)


def _half(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    masters = zip(optimizer.shard_fp32_from_float16_groups, optimizer.shard_float16_groups, strict=True)
    for owners, (fp32, fp16) in zip(optimizer.model_float16_groups, masters, strict=True):
        # A precision-aware optimizer keeps the masters itself, and is given the half-precision shards.
        yield owners, [half if master is None else master for master, half in zip(fp32, fp16, strict=True)]


def _slice(gradient: Tensor, part: Fragment) -> Tensor:
    return gradient.reshape(-1)[part.offset : part.offset + part.numel]
