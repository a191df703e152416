"""What the alignment of gradients and first moments costs, beside reading the optimizer's state.

    python benchmarks/cost/alignment.py [--rounds 40]

The cost benchmarks' GPT, trained by AdamW, on one and two threads; least milliseconds of many rounds, in turns, by
`time.perf_counter`. Bytes are those of the tensors that each read takes.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.append(str(Path(__file__).parents[1]))

from machine import describe_machine

from trainsentry.collectors.series import SeriesTable
from trainsentry.collectors.torch.parameters.directions import read_directions
from trainsentry.collectors.torch.parameters.readers import read_state
from trainsentry.collectors.torch.rows.step_rows import StepRows
from trainsentry.collectors.torch.sharding.model_names import ModelNames
from trainsentry.monitor.demo.model import Gpt, GptConfig


def least(read: Callable[[], None], rows: StepRows) -> float:
    """Return the milliseconds of one read, whose rows are dropped."""
    began = time.perf_counter()
    read()
    seconds = time.perf_counter() - began
    rows.drop()
    return 1e3 * seconds


def measure(rounds: int) -> tuple[float, float, int, int]:
    """Return the least milliseconds of reading the state and of the alignment, and the bytes of both."""
    torch.manual_seed(0)
    model = Gpt(GptConfig(layers=6, width=256, heads=4))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(256, (2, 33))
    for _ in range(2):
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
    names = ModelNames()
    names.add([model], [optimizer])
    rows = StepRows(SeriesTable())
    owned = names.parameters
    state, aligned = [], []
    for _ in range(rounds):
        state.append(least(lambda: read_state(rows, optimizer, owned), rows))
        aligned.append(least(lambda: read_directions(rows, optimizer, owned), rows))
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return min(state), min(aligned), 2 * size, 2 * size


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    print("| threads | optimizer state, ms (MB) | alignment, ms (MB) | alignment ÷ state |\n|---|---|---|---|")
    for threads in (1, 2):
        torch.set_num_threads(threads)
        state, aligned, state_bytes, aligned_bytes = measure(options.rounds)
        print(
            f"| {threads} | {state:.2f} ({state_bytes / 1e6:.0f}) | {aligned:.2f} ({aligned_bytes / 1e6:.0f}) | "
            f"{aligned / state:.2f} |",
            flush=True,
        )
    print(f"\n{describe_machine()}")


if __name__ == "__main__":
    main()
