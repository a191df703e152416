"""Training whose forward pass is repeated after an incident, and a fault that only the step's own pass has."""

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import torch
from torch import nn

import trainsentry

AT = 13
STEPS = AT + 4
EQUAL = "the step's own outputs are bitwise equal: the cause is data or numerics, not the device"
FAULT = "the step computed something else than its inputs and weights give: "
NOT_COMPARED = "they were not compared with what the step computed: "


def forget_graphs():
    """Forget the graphs that dynamo has made for other tests: they are a reason not to claim a fault."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None:
        dynamo.counters.clear()


class Dense(nn.Module):
    """Two layers; `extra` is a part that a test adds."""

    def __init__(self, extra=None):
        super().__init__()
        self.first, self.extra, self.last = nn.Linear(6, 6), extra or nn.Identity(), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.extra(self.first(x)))


def rows(generator):
    return torch.randn(5, 6, generator=generator)


def squares(output):
    """Return the mean square of an output or of its logits."""
    return getattr(output, "logits", output).float().square().mean()


def update(model, optimizer, *, spoiled):
    """Update with one gradient that is NaN, if `spoiled`; its weight is finite again afterwards."""
    first = next(model.parameters()).detach().view(-1)
    healthy = first[0].clone()
    if spoiled:
        next(model.parameters()).grad.view(-1)[0] = float("nan")
    optimizer.step()
    if spoiled:
        first[0] = healthy
    optimizer.zero_grad()


def train(
    out,
    model,
    batch=rows,
    *,
    context=nullcontext,
    watched=True,
    after=None,
    before=None,
    loss=squares,
    strict=True,
    **dump,
):
    """Train with a gradient that is NaN at one step; return the incidents' replay actions.

    `before(step)` and `after(step, output)` run around the forward pass.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    dump = {"replay": True, **dump}
    config = {"output_dir": str(out), "strict": strict, "on_incident": {"dump": dump, "sample_every_step_for": 0}}
    monitor = trainsentry.TrainMonitor(config).watch(model, optimizer) if watched else nullcontext()
    generator = torch.Generator().manual_seed(1)
    with monitor:
        for step in range(STEPS):
            if before is not None:
                before(step)
            with context():
                output = model(batch(generator))
                if after is not None:
                    after(step, output)
            loss(output).backward()
            update(model, optimizer, spoiled=step == AT)
            if watched and step >= AT:
                monitor.flush()  # these steps take a millisecond, and the recorder is a process of its own
        if not watched:
            return []
        monitor.flush()
        return [a for i in monitor.incidents for a in i.actions if a.startswith("replay")]


def corrupt_once(module, value=1e4):
    """Change one element of a module's output in the step's own pass only; return the functions around the pass."""
    broken = SimpleNamespace(now=False)

    def corrupt(module, args, output):
        if broken.now:
            output = output.clone()
            output.view(-1)[2] = value
        return output

    module.register_forward_hook(corrupt)

    def before(step):
        broken.now = step == AT

    def after(step, output):
        broken.now = False

    return {"before": before, "after": after}


def made(kind):
    """Return a model with the same weights each time."""
    torch.manual_seed(0)
    return kind()
