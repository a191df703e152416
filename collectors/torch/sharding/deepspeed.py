"""DeepSpeed with ZeRO 0 to 3: parameters, gradients and optimizer state are in flat fp32 partitions.

Its public functions (`safe_get_full_*`) gather whole tensors, which is too slow at every step, so its private tables
are read. Known: 0.17 to 0.19.8; `_check` compares the partitions' values with the model's weights.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainsentry.collectors.torch.sharding.local_shards import Fragment, LocalShard
from trainsentry.collectors.torch.sharding.sharding import BeforeReduction, OuterOptimizer, Sharding

Partitions = dict[int, tuple[Any, Fragment | None]]
"""Maps the id of a model's parameter to the tensor that the optimizer updates, and this rank's fragment of it."""


class _DeepSpeed(Sharding):
    name = "DeepSpeed"
    library = "deepspeed"
    holders = frozenset({"DeepSpeedEngine", "PipelineEngine"})
    before_reduction: BeforeReduction = "on_owner"

    def is_data_parallel(self, model: nn.Module) -> bool | None:
        if any(getattr(module, "mpu", None) is not None for module in model.modules()):  # a model-parallel group
            return False
        return super().is_data_parallel(model)

    def local_shards(self, model: nn.Module, outer: Sequence[OuterOptimizer]) -> Mapping[int, Sequence[LocalShard]]:
        found: dict[int, Sequence[LocalShard]] = {}
        owners = {id(parameter): parameter for parameter in model.parameters()}
        for each in outer:
            if each.sharding is self:
                for key, (flat, fragment) in _partitions_of(each.optimizer, model).items():
                    if key in owners:
                        found[key] = (LocalShard(flat, fragment, owner=owners[key]),)
        return found

    def engine_optimizer(self, model: nn.Module) -> Any:
        is_engine = any(c.__name__ == "DeepSpeedEngine" for c in type(model).__mro__) and self.holds_model(model)
        return getattr(model, "optimizer", None) if is_engine else None

    def inner_optimizer(self, optimizer: Any) -> Optimizer | None:
        inner = getattr(optimizer, "optimizer", None)
        is_outer = type(optimizer).__module__.startswith("deepspeed.") and isinstance(inner, Optimizer)
        return inner if is_outer else None

    def loss_scale(self, optimizer: Any) -> float:
        return float(getattr(optimizer, "loss_scale", 1.0) or 1.0)

    def adapts_loss_scale(self, optimizer: Any) -> bool:
        return bool(getattr(optimizer, "dynamic_loss_scale", False))

    def reduced_gradients(self, optimizer: Any) -> dict[int, Tensor]:
        gradients = getattr(optimizer, "averaged_gradients", None) or {}
        groups: Any = getattr(optimizer, "fp16_groups", None) or getattr(optimizer, "bit16_groups", ())
        found = {}
        for i, parameters in enumerate(groups):
            own = gradients.get(i) or ()
            for position, parameter in enumerate(parameters):
                place = position if hasattr(parameter, "ds_id") else _place(parameter)
                if place is not None and place < len(own):
                    found[id(parameter)] = own[place]
        return found


DEEPSPEED = _DeepSpeed()


def _partitions_of(optimizer: Any, model: nn.Module) -> Partitions:
    """Return the place of each parameter of a model in DeepSpeed's optimizer.

    Raises:
        RuntimeError: when the tables are missing, or do not match the model's weights.

    """
    for attribute, tables in _KINDS.items():
        if hasattr(optimizer, attribute):
            try:
                found = dict(tables(optimizer))
                _check(model, found)
            except (AttributeError, IndexError, RuntimeError, TypeError) as error:
                raise _unexpected(optimizer, f"{type(error).__name__}: {error}") from error
            return found
    raise _unexpected(optimizer, "it has none of the known tables")


def _place(parameter: Any) -> int | None:
    """Return a parameter's index in its partition's list of gradients; None where the partition has none of it."""
    return parameter._index_in_param_group if getattr(parameter, "_hp_mapping", None) is not None else None


def _stage_3(optimizer: Any) -> Iterator[tuple[int, tuple[Tensor, Fragment]]]:
    for parameters, flat in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
        start = 0
        for parameter in parameters:
            size = parameter.partition_numel()
            rank = torch.distributed.get_rank(parameter.ds_process_group)
            offset = rank * size
            numel = max(0, min(size, parameter.ds_numel - offset))  # padding follows
            whole = tuple(int(n) for n in parameter.ds_shape)
            yield id(parameter), (flat, Fragment(start, numel, offset if numel else 0, whole))
            start += size


def _stage_1_and_2(optimizer: Any) -> Iterator[tuple[int, tuple[Tensor, Fragment]]]:
    yield from _mapped(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups)


def _bf16(optimizer: Any) -> Iterator[tuple[int, tuple[Tensor, Fragment]]]:
    yield from _mapped(optimizer.bf16_groups, optimizer.fp32_groups_flat_partition)


def _mapped(groups: Any, flats: Any) -> Iterator[tuple[int, tuple[Tensor, Fragment]]]:
    for parameters, flat in zip(groups, flats, strict=True):
        for parameter in parameters:
            whole, mapping = tuple(int(n) for n in parameter.shape), parameter._hp_mapping
            if mapping is None:
                yield id(parameter), (flat, Fragment(0, 0, 0, whole))
                continue
            here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
            yield id(parameter), (flat, Fragment(here.start, here.numel, there.start, whole))


def _flat_copies(optimizer: Any) -> Iterator[tuple[int, tuple[Tensor, Fragment]]]:
    for parameters, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
        start = 0
        for parameter in parameters:
            yield id(parameter), (flat, Fragment(start, parameter.numel(), 0, tuple(int(n) for n in parameter.shape)))
            start += parameter.numel()


def _copies(optimizer: Any) -> Iterator[tuple[int, tuple[Tensor, None]]]:
    for parameters, wide in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
        for parameter, copy in zip(parameters, wide, strict=True):
            yield id(parameter), (copy, None)


_KINDS: dict[str, Callable[[Any], Any]] = {
    "fp32_partitioned_groups_flat": _stage_3,
    "single_partition_of_fp32_groups": _stage_1_and_2,
    "fp32_groups_flat_partition": _bf16,
    "fp32_groups_flat": _flat_copies,
    "fp32_groups": _copies,
}
"""Maps the attribute that identifies each DeepSpeed optimizer to the reader of its tables."""


def _check(model: nn.Module, partitions: Partitions) -> None:
    """Check that the partitions, rounded to the weights' dtype, equal the model's weights to the bit."""
    for parameter in model.parameters():
        flat, fragment = partitions.get(id(parameter), (None, None))
        if flat is None:
            continue
        if hasattr(parameter, "ds_tensor"):
            own, start = parameter.ds_tensor.detach().reshape(-1), 0
        else:
            own, start = parameter.detach().reshape(-1), fragment.offset if fragment is not None else 0
        if own.is_meta or flat.device != own.device or not own.numel() or not flat.numel():
            continue  # offloaded: its values cannot be compared
        wide = flat.detach().reshape(-1) if fragment is None else fragment.of(flat)
        narrow = own.narrow(0, start, wide.numel())
        if not torch.equal(wide.to(narrow.dtype).nan_to_num(), narrow.nan_to_num()):
            raise RuntimeError("a partition's values differ from the model's weights")


def _unexpected(optimizer: Any, what: str) -> RuntimeError:
    import deepspeed

    return RuntimeError(
        f"watch(model): {type(optimizer).__name__} of DeepSpeed {deepspeed.__version__} has an unknown layout of "
        f"partitions ({what}); allowed: DeepSpeed 0.17 to 0.19.8, or watch(engine.module), which reads activations and "
        "the gradients before reduction, with monitor.step() after engine.step()"
    )
