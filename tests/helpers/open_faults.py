"""Runs cases of the fault benchmark's open list without a monitor, and says what became of the training."""

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "faults"))
import work

EARLY = 9
"""Where the fault sets in, so that a run is short."""


def trained(case_id, family, *, faulty):
    """Train a few steps; return the losses and everything that the run holds at its end, as tensors by name."""
    from training import Run

    torch.set_num_threads(1)
    case = work.load_cases()[case_id]
    run = Run(case, family, case.optimizers[0], 0, faulty=faulty)
    run.fault_step, run.steps = EARLY, EARLY + 6
    losses = run.train_alone()
    held = {f"weight {n}": t for n, t in run.plain.state_dict().items()}
    for index, state in enumerate(run.optimizer.state.values()):
        held |= {f"state {index} {key}": value for key, value in state.items() if isinstance(value, torch.Tensor)}
    return losses, {name: tensor.detach().clone() for name, tensor in held.items()}


def harm(case_id, family):
    """Return whether the losses before the fault are the same with it and without, and what it changed."""
    sound_losses, sound = trained(case_id, family, faulty=False)
    losses, held = trained(case_id, family, faulty=True)
    same = {n for n in sound if n in held and torch.equal(sound[n], held[n])}
    return losses[:EARLY] == sound_losses[:EARLY], sorted(set(sound) - same)
