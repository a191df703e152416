"""Registers the kinds of sharding, and combines their answers about a model."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from trainsentry.collectors.torch.optimizers.wrappers import FoundOptimizer, unwrapped
from trainsentry.collectors.torch.sharding.ddp import DDP
from trainsentry.collectors.torch.sharding.deepspeed import DEEPSPEED
from trainsentry.collectors.torch.sharding.dtensor import DTENSOR
from trainsentry.collectors.torch.sharding.fsdp1 import FSDP1
from trainsentry.collectors.torch.sharding.local_shards import LocalShard
from trainsentry.collectors.torch.sharding.megatron import MEGATRON
from trainsentry.collectors.torch.sharding.sharding import OuterOptimizer, Sharding

_shardings: list[Sharding] = [DEEPSPEED, MEGATRON, FSDP1, DTENSOR, DDP]
"""Ordered from the outermost: where several shard a parameter, the first one's part is used."""


def register_sharding(sharding: Sharding) -> None:
    """Add a kind of sharding before all others; call it before `watch`.

    Raises:
        ValueError: when a kind of that name is registered.

    """
    if any(known.name == sharding.name for known in _shardings):
        names = ", ".join(known.name for known in _shardings)
        raise ValueError(f"register_sharding: {sharding.name!r} is registered; allowed: any name except {names}")
    _shardings.insert(0, sharding)


def unregister_sharding(sharding: Sharding) -> None:
    """Undo `register_sharding`."""
    _shardings.remove(sharding)


def name_parts() -> frozenset[str]:
    """Return the parts of dotted names that wrappers add."""
    return frozenset().union(*(sharding.name_parts for sharding in _shardings))


def held_as(module: nn.Module) -> str:
    """Return the attribute under which a wrapper keeps the user's model, "" for other modules."""
    return next((sharding.held_as for sharding in _shardings if sharding.holds_model(module)), "")


def is_holder(module: nn.Module) -> bool:
    """Whether a module is a wrapper that distributes its inner model."""
    return any(sharding.holds_model(module) for sharding in _shardings)


def libraries() -> tuple[str, ...]:
    """Return the packages whose stack frames are not the user's code."""
    return tuple({sharding.library for sharding in _shardings})


def is_data_parallel(model: nn.Module) -> bool:
    """Whether each rank trains on its own data: under DDP, FSDP or ZeRO, without tensor parallelism."""
    answers = [sharding.is_data_parallel(model) for sharding in _shardings]
    return True in answers and False not in answers


def local_shards(model: nn.Module, outer: Sequence[OuterOptimizer]) -> dict[int, tuple[Sharding, Sequence[LocalShard]]]:
    """Map the id of each sharded parameter object to its kind of sharding and its parts on this rank.

    Raises:
        RuntimeError: when the layout of a library's shards is unknown.

    """
    found: dict[int, tuple[Sharding, Sequence[LocalShard]]] = {}
    for sharding in _shardings:
        for key, shards in sharding.local_shards(model, outer).items():
            found.setdefault(key, (sharding, shards))
    return found


def snapshots(model: nn.Module) -> list[tuple[Sharding, Any]]:
    """Return each kind's snapshot of a model, for `wrapped_since`."""
    return [(sharding, sharding.snapshot(model)) for sharding in _shardings]


def engine_optimizers(chunks: Iterable[nn.Module]) -> list[Any]:
    """Return the optimizers of the engines among model chunks."""
    found = (sharding.engine_optimizer(chunk) for chunk in chunks for sharding in _shardings)
    return [optimizer for optimizer in found if optimizer is not None]


def outer_optimizers(chunks: Iterable[nn.Module], given: Iterable[Any] = ()) -> list[OuterOptimizer]:
    """Return the optimizers that do more than wrap one of torch, among those of engines and those in `given`."""
    return list(_outer(unwrapped([*engine_optimizers(chunks), *given])))


def _outer(optimizers: Iterable[FoundOptimizer]) -> Iterator[OuterOptimizer]:
    for found in optimizers:
        for sharding in _shardings:
            inner = sharding.inner_optimizer(found.optimizer)
            if inner is not None:
                yield OuterOptimizer(found.optimizer, inner, sharding, found.stepped_by)
                break
