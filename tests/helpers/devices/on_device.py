"""A small model on a device, watched or not, and trained without a look at its values."""

import torch
from tiny_models import EVERY_STEP, Gpt, batch_for
from torch.nn import functional as F

import trainsentry


def make(device, kind=Gpt):
    """Return a model on the device and a fused or foreach AdamW, as torch chooses."""
    torch.manual_seed(0)
    model = kind().to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def batches(model, steps, device, seed=0):
    """Return the batches of a run, on the device."""
    generator = torch.Generator().manual_seed(seed)
    return [tuple(x.to(device) for x in batch_for(model, generator)) for _ in range(steps)]


def train(model, optimizer, data, monitor=None, before_step=None, autocast=None, scaler=None):
    """Train; return the losses as tensors of the device: nothing here waits for it."""
    losses = []
    for step, (inputs, targets) in enumerate(data):
        if before_step is not None:
            before_step(step)
        with torch.autocast(inputs.device.type, dtype=autocast, enabled=autocast is not None):
            loss = F.cross_entropy(model(inputs).flatten(0, -2), targets)
        optimizer.zero_grad()
        (loss if scaler is None else scaler.scale(loss)).backward()
        if monitor is not None:
            monitor.log(loss=loss.detach())
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        losses.append(loss.detach())
    return losses


def everything(out, **settings):
    """Return a configuration that samples everything at every step."""
    return {"output_dir": str(out), "collect": EVERY_STEP, "strict": True, **settings}


def watched(out, device, steps, kind=Gpt, **settings):
    """Train under a monitor; return the losses, the weights, the records and the incidents."""
    model, optimizer = make(device, kind)
    with trainsentry.TrainMonitor(everything(out, **settings)).watch(model, optimizer) as monitor:
        losses = train(model, optimizer, batches(model, steps, device), monitor)
        records = monitor.records()
        monitor.flush()
        incidents = monitor.incidents
    return [x.item() for x in losses], state(model), records, incidents


def bare(device, steps, kind=Gpt):
    """Return the losses and weights of the same run without a monitor."""
    model, optimizer = make(device, kind)
    losses = train(model, optimizer, batches(model, steps, device))
    return [x.item() for x in losses], state(model)


def state(model):
    """Return the weights and buffers on the host."""
    return {name: x.detach().cpu().clone() for name, x in model.state_dict().items()}
