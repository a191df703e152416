"""Resumes a run from its checkpoint with one mistake each, and prints what the first incident says.

    python benchmarks/detection/resumed_runs.py [--cases dropout,batch] [--collect default|everything] [--seed 0]

A language model of torch's own encoder layers trains 100 steps with warm-up, cosine and clipping, and is saved with its
optimizer, its schedule and the monitor's state. A new model, optimizer and monitor load that and go on for 40 steps.
"""

import argparse
import contextlib
import copy
import io
import logging
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from clean_runs import COLLECT
from machine import describe_machine

SAVED, STEPS, LENGTH, VOCABULARY, WIDTH = 100, 140, 32, 64, 48


class Encoder(nn.Module):
    """Causal language model: embeddings, layers of torch's encoder, a head."""

    def __init__(self, dropout: float = 0.1, eps: float = 1e-5, activation: str = "gelu") -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout, activation, eps, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 3, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, shape (batch, length, vocabulary)."""
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.layers(x, mask=mask, is_causal=True))


def batch_of(step: int, seed: int, size: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a random chain with four successors a token."""
    following = torch.randint(VOCABULARY, (VOCABULARY, 4), generator=torch.Generator().manual_seed(seed))
    generator = torch.Generator().manual_seed(10_000 * seed + step)
    tokens = torch.randint(VOCABULARY, (size, LENGTH + 1), generator=generator)
    for i in range(LENGTH):
        tokens[:, i + 1] = following[tokens[:, i], torch.randint(4, (size,), generator=generator)]
    return tokens[:, :-1].contiguous(), tokens[:, 1:]


def schedule(optimizer: torch.optim.Optimizer) -> Any:
    """Return 20 steps of warm-up and a cosine over 400."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1.0, (s + 1) / 20) * (0.5 + 0.5 * math.cos(math.pi * min(s, 400) / 400))
    )


@dataclass(frozen=True)
class Resume:
    """How a run goes on: what is loaded, and what its program has set."""

    model: Callable[[], nn.Module] = Encoder
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    before: Callable[[nn.Module, dict[str, Any]], object] = lambda _model, _state: None
    loads_optimizer: bool = True
    loads_schedule: bool = True
    schedule_is_last: bool = False
    batch: int = 8
    passes: int = 1
    first_batch: int = SAVED
    shift: int = 0
    clip: float | None = 1.0
    autocast: bool = False


def _freeze(model: nn.Module, _state: dict[str, Any]) -> None:
    model.tokens.requires_grad_(False)


def _forget_layer(_model: nn.Module, state: dict[str, Any]) -> None:
    for key in [key for key in state if key.startswith("layers.layers.1.linear1")]:
        del state[key]


CASES: Final = {
    "nothing": Resume(),
    "nothing (2)": Resume(),
    "dropout 0.3": Resume(lambda: Encoder(dropout=0.3)),
    "dropout off": Resume(lambda: Encoder(dropout=0.0)),
    "epsilon of norms": Resume(lambda: Encoder(eps=1e-2)),
    "activation function": Resume(lambda: Encoder(activation="relu")),
    "evaluation mode": Resume(before=lambda model, _: model.eval()),
    "embedding frozen": Resume(before=_freeze),
    "layer not loaded": Resume(before=_forget_layer),
    "optimizer not loaded": Resume(loads_optimizer=False),
    "schedule not loaded": Resume(loads_schedule=False),
    "schedule made last": Resume(schedule_is_last=True),
    "Adam for AdamW": Resume(optimizer=torch.optim.Adam),
    "batch of 4": Resume(batch=4),
    "accumulation of 4": Resume(passes=4),
    "autocast": Resume(autocast=True),
    "data from the start": Resume(first_batch=0),
    "data 10 steps back": Resume(first_batch=SAVED - 10),
    "clipping at 0.1": Resume(clip=0.1),
    "no clipping": Resume(clip=None),
    "tokens shifted": Resume(shift=1),
}
"""The first two are no mistakes."""


def train(model: nn.Module, optimizer: Any, rates: Any, steps: range, seed: int, how: Resume) -> None:
    """Train as a program does."""
    for step in steps:
        for micro_step in range(how.passes):
            at = step if step < SAVED else how.first_batch + step - SAVED
            inputs, targets = batch_of(at + 1000 * micro_step, seed, how.batch)
            with torch.autocast("cpu", torch.bfloat16, enabled=how.autocast):
                logits = model((inputs + how.shift) % VOCABULARY).float()
            F.cross_entropy(logits.flatten(0, 1), targets.flatten()).div(how.passes).backward()
        if how.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), how.clip)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()


def saved_run(directory: Path, seed: int, collect: str) -> dict[str, Any]:
    """Train until the checkpoint, and return it."""
    import trainsentry

    torch.manual_seed(seed)
    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rates = schedule(optimizer)
    with trainsentry.TrainMonitor({"output_dir": str(directory), **COLLECT[collect]}).watch(
        model, optimizer
    ) as monitor:
        train(model, optimizer, rates, range(SAVED), seed, Resume())
        parts = {"model": model, "optimizer": optimizer, "rates": rates, "monitor": monitor}
        return copy.deepcopy({name: part.state_dict() for name, part in parts.items()})


def resumed_run(directory: Path, state: dict[str, Any], how: Resume, seed: int, collect: str) -> list[str]:
    """Go on from a checkpoint; return the summaries of the incidents."""
    import trainsentry

    torch.manual_seed(seed + 1)
    model = how.model()
    how.before(model, state["model"])
    model.load_state_dict(state["model"], strict=False)
    optimizer = how.optimizer(model.parameters(), lr=1e-3)
    rates = None if how.schedule_is_last else schedule(optimizer)
    if how.loads_optimizer:
        optimizer.load_state_dict(state["optimizer"])
    rates = rates or schedule(optimizer)
    if how.loads_schedule:
        rates.load_state_dict(state["rates"])
    monitor = trainsentry.TrainMonitor({"output_dir": str(directory), **COLLECT[collect]})
    monitor.load_state_dict(state["monitor"])
    with monitor.watch(model, optimizer):
        train(model, optimizer, rates, range(SAVED, STEPS), seed, how)
        monitor.flush()
        return [incident.summary for incident in monitor.incidents]


def main() -> None:
    """Run the resumes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--collect", default="default", choices=sorted(COLLECT))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("trainsentry").setLevel(logging.ERROR)
    print("| resumed with | first incident |\n|---|---|")
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stderr(io.StringIO()):
        state = saved_run(Path(directory) / "saved", options.seed, options.collect)
        for number, name in enumerate(options.cases.split(",")):
            folder, loaded = Path(directory) / str(number), copy.deepcopy(state)
            said = resumed_run(folder, loaded, CASES[name], options.seed, options.collect)
            print(f"| {name} | {said[0].partition(': ')[2] if said else '—'} |", flush=True)
    print(f"\n{describe_machine()}")


if __name__ == "__main__":
    main()
