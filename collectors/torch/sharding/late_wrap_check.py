"""Finds out that a model was wrapped after `watch`, so that what is watched is not what trains."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainsentry.collectors.guard import InertWhenCopied
from trainsentry.collectors.torch.sharding.clean_names import is_holder


class LateWrapCheck(ValueError):
    """A model was wrapped or sharded after it was given to `watch`."""


class FirstPass(InertWhenCopied):
    """Forward pre-hook of a root, which looks in the first pass whether it is what was watched.

    DistributedDataParallel says which of it is running; sharded parameters show. The hook removes itself.
    """

    def __init__(self, chunk: nn.Module) -> None:
        self._known = [weakref.ref(m) for m in _living_wrappers()]
        self._sharded = is_sharded(chunk)
        self._handle = chunk.register_forward_pre_hook(self)

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Check once.

        Raises:
            WrappedLate: when the model was wrapped since.

        """
        if torch.compiler.is_compiling():
            return
        self.close()
        what = self._what_happened(module)
        if what:
            raise LateWrapCheck(
                f"watch(model): the model was given to {what} after watch(); allowed: wrap and shard it first, make "
                "the optimizer from what comes out, and then call watch(model, optimizer)"
            )

    def close(self) -> None:
        """Remove the hook."""
        self._handle.remove()

    def _what_happened(self, module: nn.Module) -> str:
        running = getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
        if running is not None and all(known() is not running for known in self._known):
            return "DistributedDataParallel"
        return "fully_shard or another wrapper that shards it" if is_sharded(module) and not self._sharded else ""


def _living_wrappers() -> list[nn.Module]:
    """Return every DistributedDataParallel that there is: one that comes later is too late.

    There are hundreds of thousands of objects, so each is asked for its type alone, and none where no wrapper can be.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return []
    kinds = {id(kind) for kind in _with_subclasses(nn.parallel.DistributedDataParallel)}
    return [x for x in gc.get_objects() if id(type(x)) in kinds]


def _with_subclasses(kind: type) -> Iterator[type]:
    yield kind
    below: list[type] = kind.__subclasses__()
    for other in below:
        yield from _with_subclasses(other)


def is_sharded(model: nn.Module) -> bool:
    """Whether a model's parameters are sharded by FSDP, or are DTensors."""
    if any(
        getattr(m, "_is_fsdp_managed_module", False) or type(m).__name__.startswith("FSDP") for m in model.modules()
    ):
        return True
    return any(hasattr(p, "placements") for p in model.parameters())


def is_data_parallel(model: nn.Module) -> bool:
    """Whether every rank is to have data of its own: under DDP, FSDP or ZeRO, and without tensor parallelism."""
    shards = [sum(p.is_shard() for p in x.placements) for x in model.parameters() if hasattr(x, "placements")]
    if any(count > 1 for count in shards):
        return False
    if any(getattr(m, "mpu", None) is not None for m in model.modules()):  # DeepSpeed with a model-parallel group
        return False
    fully_sharded = any(type(m).__name__.startswith("FSDP") for m in model.modules())
    return fully_sharded or (not shards and any(is_holder(m) for m in model.modules()))
