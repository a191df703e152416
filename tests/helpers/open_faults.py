"""Runs cases of the fault benchmark's open list without a monitor, and says what became of the training."""

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "faults"))
import work
from case import Case

EARLY = 9
"""Where the fault sets in, so that a run is short."""

_SOUND = {}
"""What became of trainings without a fault, by family and optimizer: many cases have the same."""


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


def sound_twin(case_id, family):
    """Train without the fault, once for all cases that change nothing in such a run."""
    case = work.load_cases()[case_id]
    key = family, case.optimizers[0]
    own = (case.prepare, case.from_start, case.resume) != (Case.prepare, False, None)
    if own or case.ranks > 1 or case.expect.silent:
        return trained(case_id, family, faulty=False)
    if key not in _SOUND:
        _SOUND[key] = trained(case_id, family, faulty=False)
    return _SOUND[key]


def harm(case_id, family):
    """Return whether the losses before the fault are the same with it and without, and what it changed."""
    sound_losses, sound = sound_twin(case_id, family)
    losses, held = trained(case_id, family, faulty=True)
    same = {n for n in sound if n in held and torch.equal(sound[n], held[n])}
    return losses[:EARLY] == sound_losses[:EARLY], sorted(set(sound) - same)
