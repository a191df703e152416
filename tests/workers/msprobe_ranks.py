"""msprobe's monitor on several ranks, with collectives of the training's own."""

import json
import os

import torch
import torch.distributed as dist

from trainsentry.pytorch import TrainerMon


def run(folder, **changes):
    """Train three steps; return how the training ended."""
    os.environ["MONITOR_OUTPUT_DIR"] = str(folder / "out")
    path = folder / f"config{dist.get_rank()}.json"
    path.write_text(json.dumps({"targets": {}, "wg_distribution": True, "ops": ["norm", "max"], **changes}))
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = TrainerMon(str(path))
    monitor.set_monitor(model, optimizer, 1)
    try:
        for _ in range(3):
            model(torch.full((2, 4), 1.0 + dist.get_rank())).square().sum().backward()
            dist.all_reduce(torch.ones(3))
            dist.all_reduce(torch.ones(4))  # the line that is chosen
            optimizer.step()
            optimizer.zero_grad()
    except RuntimeError as stop:
        return str(stop)
    finally:
        monitor.close()
        del os.environ["MONITOR_OUTPUT_DIR"]
    return ""


def line(text):
    """Return the number of the line of this file that holds a text."""
    with open(__file__) as file:
        return next(number for number, found in enumerate(file, 1) if text in found)
