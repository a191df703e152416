"""DeepSpeed with ZeRO 0 to 3: parameters, gradients and optimizer state lie in flat fp32 partitions.

Its public functions (`safe_get_full_*`) gather whole tensors, which no monitor may do at every step, so its own
tables are read. Known: 0.17 to 0.19.8; `check` compares the partitions' values with the model's own weights.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainsentry.collectors.torch.sharding.local_shards import Fragment, LocalShard
from trainsentry.collectors.torch.sharding.sharding import BeforeReduction, OuterOptimizer, Sharding

Held = dict[int, tuple[Any, Fragment | None]]
"""By the id of a model's parameter: the tensor that the optimizer moves, and this rank's fragment in it."""


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
                for key, (flat, fragment) in _held_by(each.optimizer, model).items():
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


def _held_by(optimizer: Any, model: nn.Module) -> Held:
    """Return where an optimizer of DeepSpeed's holds each parameter of its model.

    Raises:
        RuntimeError: when the tables are not where they are expected, or say what is not so.

    """
    for attribute, tables in _KINDS.items():
        if hasattr(optimizer, attribute):
            try:
                held = dict(tables(optimizer))
                _check(model, held)
            except (AttributeError, IndexError, RuntimeError, TypeError) as error:
                raise _unexpected(optimizer, f"{type(error).__name__}: {error}") from error
            return held
    raise _unexpected(optimizer, "none of its tables is known")


def _place(parameter: Any) -> int | None:
    """Return where a partition's list of gradients has that of a parameter; None where it has none of it."""
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
"""The attribute by which each of DeepSpeed's optimizers is known, and how its tables are read."""


def _check(model: nn.Module, held: Held) -> None:
    """Check that what the tables point at are the model's weights: rounded to their dtype, equal to the bit."""
    for parameter in model.parameters():
        flat, fragment = held.get(id(parameter), (None, None))
        if flat is None:
            continue
        if hasattr(parameter, "ds_tensor"):
            own, start = parameter.ds_tensor.detach().reshape(-1), 0
        else:
            own, start = parameter.detach().reshape(-1), fragment.offset if fragment is not None else 0
        if own.is_meta or flat.device != own.device or not own.numel() or not flat.numel():
            continue  # offloaded: its place is all that can be known
        wide = flat.detach().reshape(-1) if fragment is None else fragment.of(flat)
        narrow = own.narrow(0, start, wide.numel())
        if not torch.equal(wide.to(narrow.dtype).nan_to_num(), narrow.nan_to_num()):
            raise RuntimeError("a partition does not hold the weights it is said to hold")


def _unexpected(optimizer: Any, what: str) -> RuntimeError:
    import deepspeed

    return RuntimeError(
        f"watch(model): {type(optimizer).__name__} of DeepSpeed {deepspeed.__version__} keeps its partitions in a way "
        f"that is not known ({what}); allowed: DeepSpeed 0.17 to 0.19.8, or watch(engine.module), which reads "
        "activations and the gradients before reduction, with monitor.step() after engine.step()"
    )
