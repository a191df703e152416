"""Communication hooks of DistributedDataParallel, and collectives that lose what they carried."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist


def average(bucket):
    """Do what DistributedDataParallel does by itself."""
    tensor = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(tensor, async_op=True).get_future().then(lambda f: f.value()[0])


@contextmanager
def losing(operator: str, lost: Callable[[int], bool]) -> Iterator[None]:
    """Have the calls of a `c10d` operator for which `lost(number)` holds give zeros on this rank."""
    calls: list[Any] = []
    overload = getattr(torch.ops.c10d, operator).default

    def kernel(keyset, output, *args):
        calls.append(output)
        result = overload.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, output, *args)
        if lost(len(calls)):
            dist.Work.unbox(result if not isinstance(result, tuple) else result[1]).wait()
            (output[0] if isinstance(output, (list, tuple)) else output).zero_()
        return result

    library = torch.library.Library("c10d", "IMPL")
    library.impl(operator, kernel, "ADInplaceOrView", with_keyset=True)
    try:
        yield
    finally:
        library._destroy()
