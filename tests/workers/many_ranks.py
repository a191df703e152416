"""Has four ranks believe that they are many, on one host or on several."""

from contextlib import contextmanager

import replica_faults
import torch.distributed as dist

from trainsentry.monitor.ranks import rank_group, recorder_address
from trainsentry.monitor.recorder.ranks import tree_position


@contextmanager
def hosts(count):
    """Have the ranks believe that they share this many hosts, each of which listens to one other."""
    name, fanout = recorder_address.socket.gethostname, tree_position.FANOUT
    tree_position.FANOUT = 1
    host = f"host{dist.get_rank() * count // dist.get_world_size()}"
    recorder_address.socket.gethostname = lambda: host
    try:
        yield
    finally:
        recorder_address.socket.gethostname, tree_position.FANOUT = name, fanout


def on_hosts(count, function, *args, **kwargs):
    """Call a function while the ranks share so many hosts."""
    with hosts(count):
        return function(*args, **kwargs)


def run(out, fault_rank, count):
    """Train with a broken replica on one rank of many; return the incidents that each rank knows."""
    many = rank_group.MANY_RANKS
    rank_group.MANY_RANKS = 4
    try:
        config = {"collect": {"parameters": {"every": 1}}, "on_incident": {"dump": False}}
        return on_hosts(count, replica_faults.run, "Ddp", out, rank=fault_rank, config=config)
    finally:
        rank_group.MANY_RANKS = many
