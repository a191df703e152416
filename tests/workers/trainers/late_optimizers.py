"""A loop whose optimizer is made after `watch`, on ranks of which some are left out."""

import torch
from strategy import batches, make_net

import trainsentry


def stopped_at(out, ranks, marked):
    """Ask for a stop at step 3 where the rank is watched; return the step at which this rank stops."""
    net = make_net()
    monitor = trainsentry.TrainMonitor({"output_dir": str(out), "ranks": ranks, "strict": True}).watch(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    try:
        for step, (x,) in enumerate(batches(12)):
            net(x).square().mean().backward()
            if step == 3 and torch.distributed.get_rank() in ranks:
                monitor.request_stop("planted")
            optimizer.step()
            optimizer.zero_grad()
            if marked:
                monitor.step()
    except trainsentry.TrainingStopped as stop:
        return stop.step, step
    finally:
        monitor.close()
    return None
