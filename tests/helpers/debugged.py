"""A small model with awkward parts, and a training loop under a debugger."""

import json

import torch
import torch.nn.functional as F
from torch import nn

from trainsentry import PrecisionDebugger

LEVELS = ["L0", "L1", "mix"]


class Awkward(nn.Module):
    """Convolution, batch norm, in-place activation, dropout, operators, recurrence, attention, nested results."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(2)
        self.fc = nn.Linear(4, 5)
        self.drop = nn.Dropout(0.1)
        self.lstm = nn.LSTM(5, 5, batch_first=True)
        self.mha = nn.MultiheadAttention(5, 1, batch_first=True)

    def forward(self, x, scale=None):
        h = self.pool(self.relu(self.bn(self.conv(x)))).mean((2, 3))
        h += 1
        h = 2 - self.drop(self.fc(h)) * scale
        o, _ = self.lstm(h.unsqueeze(1))
        y, _ = self.mha(o, o, o, need_weights=False)
        z = torch.relu(y[:, 0]) @ self.fc.weight
        z = torch.einsum("bi,ij->bj", z, self.fc.weight.t())
        z[0] = 0
        return {"z": z, "rest": [z.sum(), 3, "s", None, torch.tensor([1, 2]), torch.tensor([True, False])]}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


class Tower(nn.Module):
    """Blocks with residual connections between two linear layers."""

    def __init__(self, width=8, depth=2):
        super().__init__()
        self.first = nn.Linear(4, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.last = nn.Linear(width, 1)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Encoder(nn.Module):
    """Embedding, a layer of torch's own transformer, a recurrent layer, a loss."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.rnn = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 11, bias=False)

    def forward(self, x):
        tokens = (x.abs() * 10).long().clamp(0, 10)
        h, _ = self.rnn(self.layer(self.tokens(tokens)))
        logits = self.head(F.silu(h) / 2 - 0.1)
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def train(model, steps, debugger=None, optimizer=None, scale=1.0):
    """Train on fixed data; return the losses, the state of the model, and that of the random numbers."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(3)
    losses = []
    for _ in range(steps):
        if debugger is not None:
            debugger.start(model=model)
        if isinstance(model, Awkward):
            loss = model(torch.randn(2, 3, 8, 8, generator=generator), scale=torch.tensor(2.0))["z"].pow(2).mean()
        else:
            loss = (model(torch.randn(6, 4, generator=generator)) * scale).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if debugger is not None:
            debugger.stop()
            debugger.step()
        losses.append(loss.item())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return losses, state, torch.get_rng_state()


def make(kind, **arguments):
    torch.manual_seed(0)
    return kind(**arguments)


def debug(folder, steps=1, kind=Tower, model=None, **config):
    """Train under a debugger; return the dump of each step."""
    folder.mkdir(exist_ok=True)
    path = folder / "config.json"
    task = config.get("task", "statistics")
    path.write_text(json.dumps({"dump_path": str(folder / "dump"), "task": task, task: {}, **config}))
    debugger = PrecisionDebugger(str(path))
    try:
        train(model if model is not None else make(kind), steps, debugger)
        assert debugger._session.guard.failures == {}
    finally:
        debugger.close()
    return [read(folder / "dump" / f"step{step}" / "rank0") for step in range(steps)]


def read(directory):
    """Return a dump's three files."""
    return {name: json.loads((directory / f"{name}.json").read_text()) for name in ("dump", "stack", "construct")}
