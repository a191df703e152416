"""One rank sleeps before a collective, and goes on later."""

import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from written_files import json_lines

import trainsentry
from trainsentry.monitor.ranks import hang_watch


def run(out, sleeper, ddp=False, device="cpu"):
    """Sleep for a while on one rank at step 4; return what each rank was told, and the steps it did."""
    hang_watch.REPORT_SECONDS = 0.5
    model = nn.Linear(2, 2).to(device)
    wrapped = nn.parallel.DistributedDataParallel(model) if ddp else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"output_dir": str(out), "hang_check": {"seconds": 0.8}}
    settings["collect"] = {"communication": {"reducer": ddp}}
    monitor = trainsentry.TrainMonitor(settings).watch(wrapped, optimizer)
    for step in range(6):
        if step == 4 and dist.get_rank() == sleeper:
            time.sleep(3.0)
        wrapped(torch.ones(1, 2, device=device)).sum().backward()
        if not ddp:
            for parameter in model.parameters():
                gradient = parameter.grad.cpu()  # gloo reduces on the host
                dist.all_reduce(gradient)
                parameter.grad.copy_(gradient)
        optimizer.step()
    done = monitor._loop.step
    monitor.close()
    dist.barrier()
    directory = Path(out) / f"rank{dist.get_rank()}"
    told = json.loads((directory / "hang.json").read_text())
    lines = json_lines(Path(out) / "incidents.jsonl")
    incidents = list({line["id"]: line for line in lines}.values())  # the newest line of each
    return told["message"], done, (directory / "hang_stacks.txt").read_text(), incidents
