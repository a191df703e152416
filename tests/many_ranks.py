"""As if four ranks were many: on one host, or on two."""

import replica_faults
import torch.distributed as dist

from trainsentry.monitor import company, listening
from trainsentry.monitor.recorder import place


def run(out, fault_rank, hosts):
    """Train with a broken replica on one rank; return what each rank knows of it."""
    many, name, fanout = company.MANY_RANKS, listening.socket.gethostname, place.FANOUT
    company.MANY_RANKS, place.FANOUT = 4, 1
    host = f"host{dist.get_rank() * hosts // dist.get_world_size()}"
    listening.socket.gethostname = lambda: host
    try:
        config = {"collect": {"parameters": {"every": 1}}, "on_incident": {"dump": False}}
        return replica_faults.run("Ddp", out, rank=fault_rank, config=config)
    finally:
        company.MANY_RANKS, listening.socket.gethostname, place.FANOUT = many, name, fanout
