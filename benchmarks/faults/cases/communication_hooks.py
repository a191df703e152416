"""Communication hooks of DistributedDataParallel."""

import torch.distributed as dist


def average(bucket):
    """Do what DistributedDataParallel does by itself."""
    tensor = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(tensor, async_op=True).get_future().then(lambda f: f.value()[0])
