"""DistributedDataParallel: every rank holds the whole model, and buckets of gradients are averaged."""

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
        """DistributedDataParallel says which of its wrappers runs."""
        active = getattr(DistributedDataParallel, "_active_ddp_module", None)
        late = active is not None and all(known() is not active for known in snapshot)
        return self.name if late else ""


DDP = _Ddp()


def has_reducer(chunks: Iterable[nn.Module]) -> bool:
    """Whether a model is wrapped so that C++ reduces its gradients."""
    return any(isinstance(module, DistributedDataParallel) for chunk in chunks for module in chunk.modules())


def _living_wrappers() -> list[nn.Module]:
    """Return every DistributedDataParallel that exists: a later one is too late.

    There are hundreds of thousands of objects, so each is asked for its type alone, and none where no wrapper can be.
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
