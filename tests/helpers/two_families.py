"""Two model families with their data: a decoder over tokens, and a convolutional net with batch norm."""

import math

import torch
from torch import nn

import trainsentry


class Gpt(nn.Module):
    """A decoder of two blocks over tokens."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(16, 32)
        self.register_buffer("mask", torch.full((12, 12), -math.inf).triu(1))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, src_mask=self.mask)
        return self.head(x)


class ResNet(nn.Module):
    """A convolutional net with batch norm and a residual."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.body(x)
        return self.head(x.mean((2, 3)))


def text(generator):
    tokens = torch.randint(0, 32, (8, 1), generator=generator) + torch.arange(13)
    tokens = (tokens + torch.randint(0, 2, tokens.shape, generator=generator)) % 32
    return tokens[:, :-1], tokens[:, 1:].flatten()


def images(generator):
    labels = torch.randint(0, 4, (16,), generator=generator)
    pixels = torch.randn(16, 3, 8, 8, generator=generator)
    pixels[:, 0] += 0.3 * (labels[:, None, None] - 1.5)
    return pixels, labels


FAMILIES = {
    "gpt": (Gpt, text, "head.weight", "embedding.weight"),
    "resnet": (ResNet, images, "head.weight", "stem.0.weight"),
}

STEPS, FAULT = 130, 93

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=2e-3, weight_decay=0.02),
    "adam with decay": lambda p: torch.optim.Adam(p, lr=2e-3, weight_decay=0.02),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "dampened": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, dampening=0.5),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "learns fast": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "climbs": lambda p: torch.optim.AdamW(p, lr=1e-4, maximize=True),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=2e-3, amsgrad=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=2e-3),
    "centred": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adadelta": torch.optim.Adadelta,
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.02),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "fused": lambda p: torch.optim.AdamW(p, lr=2e-3, weight_decay=0.02, fused=True),
    "two groups": lambda p: torch.optim.AdamW(_halves(list(p)), lr=2e-3),
}


def _halves(parameters):
    middle = len(parameters) // 2
    return [
        {"params": parameters[:middle]},
        {"params": parameters[middle:], "betas": (0.95, 0.95), "weight_decay": 0.1},
    ]


CONFIGURATIONS = {
    "default": {},
    "everything": {p: {"every": 1} for p in ("parameters", "optimizer_state", "updates", "activations")},
}
STATISTICS = {"default": ["norm", "mean"], "everything": ["norm", "mean", "min", "max", "alignment"]}


def train(
    tmp_path,
    family,
    optimizer="adamw",
    collect="default",
    harm=None,
    batch=None,
    steps=STEPS,
    clip=None,
    dump=False,
    micro_steps=1,
):
    """Train a family; `harm(model, optimizer, step)` runs before each update, `batch(step, given)` changes batches.

    Where a step has several micro-steps, the gradients after each of them are read too.
    """
    make, data, *_ = FAMILIES[family]
    torch.manual_seed(0)
    model = make()
    stepper = OPTIMIZERS[optimizer](model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(stepper, lambda s: min((s + 1) / 20, 1) * (1 - s / (2 * STEPS)))
    per_micro_step = {"gradients": {"per_micro_step": True, "before_reduction": True}} if micro_steps > 1 else {}
    config = {
        "output_dir": str(tmp_path),
        "collect": CONFIGURATIONS[collect] | per_micro_step,
        "statistics": STATISTICS[collect],
        "on_incident": {"dump": dump},
        "strict": True,
    }
    monitor = trainsentry.TrainMonitor(config).watch(model, stepper)
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        for _ in range(micro_steps):
            given = data(generator)
            inputs, targets = given if batch is None else batch(step, given)
            loss = nn.functional.cross_entropy(model(inputs).flatten(0, -2), targets)
            (loss / micro_steps).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if harm is not None:
            harm(model, stepper, step)
        monitor.log(loss=loss)
        stepper.step()
        stepper.zero_grad()
        schedule.step()
    monitor.flush()
    found = sorted(monitor.incidents, key=lambda i: i.id)
    monitor.close()
    return found
