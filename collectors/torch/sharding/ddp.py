"""DistributedDataParallel: every rank has the whole model, and gradients are averaged in buckets."""

import gc
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainsentry.collectors.torch.sharding.sharding import Sharding


class _Ddp(Sharding):
    name = "DistributedDataParallel"
    holders = frozenset({"DistributedDataParallel", "DataParallel"})

    def snapshot(self, model: nn.Module) -> Any:
        return [weakref.ref(wrapper) for wrapper in _living_wrappers()]

    def wrapped_since(self, snapshot: Any, running: nn.Module) -> str:
        """Compare the running wrapper, which DistributedDataParallel stores, with those of the snapshot."""
        active = getattr(DistributedDataParallel, "_active_ddp_module", None)
        late = active is not None and all(known() is not active for known in snapshot)
        return self.name if late else ""


DDP = _Ddp()


def has_reducer(chunks: Iterable[nn.Module]) -> bool:
    """Whether DistributedDataParallel, which reduces gradients in C++, wraps a model."""
    return any(isinstance(module, DistributedDataParallel) for chunk in chunks for module in chunk.modules())


def wrapper_around(model: nn.Module) -> nn.Module:
    """Return the DistributedDataParallel that trains a model, or the model itself."""
    return next((wrapper for wrapper in _living_wrappers() if getattr(wrapper, "module", None) is model), model)


def _living_wrappers() -> list[nn.Module]:
    """Return every existing DistributedDataParallel.

    A process has hundreds of thousands of objects, so the search compares only their types, and is left out without a
    process group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return []
    kinds = {id(kind) for kind in _with_subclasses(DistributedDataParallel)}
    return [x for x in gc.get_objects() if id(type(x)) in kinds]


def _with_subclasses(kind: type) -> Iterator[type]:
    yield kind
    below: list[type] = kind.__subclasses__()
    for other in below:
        yield from _with_subclasses(other)
