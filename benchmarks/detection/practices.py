"""Counts the incidents of healthy runs in which practitioners do what they do on purpose: every one is a false alarm.

    python benchmarks/detection/practices.py [--practices lion,layer_drop] [--seeds 0-2] [--collect default]

Each practice is a training of its own, which does something in its midst or throughout that a monitor may take for a
fault. Printed are the runs of each practice with an incident, and what the first of them said; notes wake nobody and
are counted apart.
"""

import argparse
import contextlib
import copy
import io
import logging
import multiprocessing
import os
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from torch import nn
from torch.nn import functional as F

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from clean_runs import COLLECT
from machine import describe_machine
from practice_models import (
    ActingPolicy,
    Convolutions,
    Decoder,
    Lion,
    PointPolicy,
    critic,
    generator,
    images,
    language_loss,
    perceptron,
    sentences,
)
from practice_training import Training, train_policy

MIDST: Final = 100
"""Step of a change on purpose: unless a practice says otherwise."""


Practice = Callable[[Training], None]


def layer_drop(run: Training) -> None:
    """Leaves out one in five layers, at random (Fan et al., "Reducing Transformer depth on demand", ICLR 2020)."""
    model = Decoder(layers=4, left_out=0.2)
    optimizer = run.adam(model)
    for _ in run.steps():
        run.update(language_loss(model, sentences(8)), optimizer)


def lion(run: Training) -> None:
    """Trains by the signs of averaged gradients."""
    model = Decoder()
    optimizer = Lion(model.parameters(), 3e-4)
    run.watch(model, optimizer)
    for _ in run.steps():
        run.update(language_loss(model, sentences(8)), optimizer)


def clip_lowered(run: Training) -> None:
    """Clips to a quarter from the midst on."""
    model = Decoder()
    optimizer = run.adam(model)
    for step in run.steps():
        run.update(language_loss(model, sentences(8)), optimizer, clip=1.0 if step < MIDST else 0.25)


def dropout_off(run: Training) -> None:
    """Switches dropout off for the rest (Liu et al., "Dropout reduces underfitting", ICML 2023)."""
    model = Decoder()
    optimizer = run.adam(model)
    for step in run.steps():
        if step == MIDST:
            for module in model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0
        run.update(language_loss(model, sentences(8)), optimizer)


def batch_ramp(run: Training) -> None:
    """Doubles the batch twice, and raises the rate by its root (Goyal et al., 2017, raise it with the batch)."""
    model = Decoder()
    optimizer = run.adam(model, 1e-3)
    for step in run.steps():
        times = 1 + (step >= 60) + 2 * (step >= 110)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * times**0.5
        run.update(language_loss(model, sentences(4 * times)), optimizer)


def more_micro_steps(run: Training) -> None:
    """Accumulates over two micro-steps from the midst on, each loss divided by two."""
    model = Decoder()
    optimizer = run.adam(model)
    for step in run.steps():
        parts = 1 if step < MIDST else 2
        for _ in range(parts - 1):
            (language_loss(model, sentences(8)) / parts).backward()
        run.update(language_loss(model, sentences(8)) / parts, optimizer)


def longer_sequences(run: Training) -> None:
    """Trains on sequences of 8, 16 and 40 words (Li et al., "The stability-efficiency dilemma", NeurIPS 2022)."""
    model = Decoder()
    optimizer = run.adam(model)
    for step in run.steps():
        length = 8 if step < 60 else 16 if step < 110 else 40
        run.update(language_loss(model, sentences(8, length)), optimizer)


def averages_for_evaluation(run: Training) -> None:
    """Evaluates with averaged weights in the place of its own every 40 steps, and samples in between."""
    model = Decoder()
    optimizer = run.adam(model)
    average = copy.deepcopy(model.state_dict())
    for step in run.steps():
        run.update(language_loss(model, sentences(8)), optimizer)
        for name, value in model.state_dict().items():
            average[name] = value.detach().lerp(average[name], 0.98)
        if step % 40 == 39:
            own = copy.deepcopy(model.state_dict())
            model.load_state_dict(average)
            model.eval()
            with torch.no_grad():
                language_loss(model, sentences(16))
            model.train()
            model.load_state_dict(own)


def sampled_more_often(run: Training) -> None:
    """Samples weights at every second step from the midst on, and optimizer state as before."""
    model = Decoder()
    optimizer = run.adam(model)
    for step in run.steps():
        if step == MIDST:
            run.sample(parameters={"every": 2})
        run.update(language_loss(model, sentences(8)), optimizer)


def norms_frozen(run: Training) -> None:
    """Freezes the running statistics of all batch norms (Jacob et al., CVPR 2018)."""
    model = Convolutions()
    optimizer = run.adam(model, 1e-3)
    for step in run.steps():
        if step >= MIDST:
            for module in model.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eval()
        drawn, classes = images(32)
        run.update(F.cross_entropy(model(drawn), classes), optimizer)


def larger_images(run: Training) -> None:
    """Trains on larger images from the midst on, as progressive resizing does."""
    model = Convolutions(dropout=0.2)
    optimizer = run.adam(model, 1e-3)
    for step in run.steps():
        drawn, classes = images(24, size=12 if step < MIDST else 20)
        run.update(F.cross_entropy(model(drawn), classes), optimizer)


def rare_objects(run: Training) -> None:
    """Trains a head on the objects of a batch, of which there may be none, as detectors of objects do."""
    model = Convolutions()
    model.box = nn.Linear(24, 2)
    optimizer = run.adam(model, 1e-3)
    for _ in run.steps():
        drawn, classes = images(12)
        features = model.features(drawn)
        objects = (classes == 0) & (torch.rand(12) < 0.9)
        boxes = (model.box(features) - 0.5).square().sum(1) * objects
        run.update(F.cross_entropy(model.head(features), classes) + boxes.sum() / objects.sum().clamp(min=1), optimizer)


def sharpness_aware(run: Training) -> None:
    """Takes two passes a step, the second from perturbed weights (Foret et al., ICLR 2021)."""
    model = Convolutions()
    optimizer = run.adam(model, 1e-3)
    for _ in run.steps():
        drawn, classes = images(24)
        F.cross_entropy(model(drawn), classes).backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
            moves = [(p, 0.05 * p.grad / norm) for p in model.parameters() if p.grad is not None]
            for p, move in moves:
                p.add_(move)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(drawn), classes)
        loss.backward()
        with torch.no_grad():
            for p, move in moves:
                p.sub_(move)
        run.monitor.log(loss=loss.detach())
        optimizer.step()
        optimizer.zero_grad()


def head_first(run: Training) -> None:
    """Trains the head alone, and the whole network from the midst on, in a group of its own."""
    model = Convolutions()
    body = [p for name, p in model.named_parameters() if not name.startswith("head")]
    for p in body:
        p.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.head.parameters(), lr=2e-3)
    run.watch(model, optimizer)
    for step in run.steps():
        if step == MIDST:
            for p in body:
                p.requires_grad_(True)
            optimizer.add_param_group({"params": body, "lr": 5e-4})
        drawn, classes = images(24)
        run.update(F.cross_entropy(model(drawn), classes), optimizer)


def backbone_frozen(run: Training) -> None:
    """Trains the head alone from some step after the midst on."""
    model = Convolutions()
    optimizer = run.adam(model, 1e-3)
    for step in run.steps():
        if step == MIDST + 3:
            for name, p in model.named_parameters():
                p.requires_grad_(name.startswith("head"))
                p.grad = None
        drawn, classes = images(24)
        run.update(F.cross_entropy(model(drawn), classes), optimizer)


def fewer_critic_updates(run: Training) -> None:
    """Updates a critic five times for one update of the generator, and later twice; clips the critic's weights."""
    made, judge = generator(), critic()
    optimizers = torch.optim.RMSprop(made.parameters(), 2e-4), torch.optim.RMSprop(judge.parameters(), 2e-4)
    run.watch(nn.ModuleDict({"generator": made, "critic": judge}), *optimizers)
    for step in run.steps():
        for _ in range(5 if step < MIDST else 2):
            false, true = made(torch.randn(16, 8)).detach(), images(16, 0.1)[0]
            run.update(judge(false).mean() - judge(true).mean(), optimizers[1], clip=None, name="critic_loss")
            with torch.no_grad():
                for p in judge.parameters():
                    p.clamp_(-0.05, 0.05)
        run.update(-judge(made(torch.randn(16, 8))).mean(), optimizers[0], clip=None)
        optimizers[1].zero_grad()


def seldom_penalty(run: Training) -> None:
    """Penalises the critic's gradient at every 16th step (Karras et al., "StyleGAN2", CVPR 2020), with β₁ = 0."""
    made, judge = generator(), critic()
    optimizers = [torch.optim.Adam(m.parameters(), 5e-4, betas=(0.0, 0.99)) for m in (made, judge)]
    run.watch(nn.ModuleDict({"generator": made, "critic": judge}), *optimizers)
    for step in run.steps():
        true = images(16, 0.1)[0].requires_grad_(True)
        of_true = judge(true)
        loss = F.softplus(-of_true).mean() + F.softplus(judge(made(torch.randn(16, 8)).detach())).mean()
        if step % 16 == 0:
            [slope] = torch.autograd.grad(of_true.sum(), true, create_graph=True)
            loss = loss + 1.6 * slope.square().sum((1, 2, 3)).mean()
        run.update(loss, optimizers[1], clip=None, name="critic_loss")
        run.update(F.softplus(-judge(made(torch.randn(16, 8)))).mean(), optimizers[0], clip=None)
        optimizers[1].zero_grad()


def critic_joins(run: Training) -> None:
    """Adds an adversarial term from the midst on (Esser et al., "Taming Transformers", CVPR 2021)."""
    coder = nn.Sequential(nn.Flatten(), nn.Linear(144, 16), nn.ReLU(), nn.Linear(16, 144), nn.Unflatten(1, (1, 12, 12)))
    judge = critic()
    optimizers = [torch.optim.Adam(m.parameters(), 1e-3) for m in (coder, judge)]
    run.watch(nn.ModuleDict({"coder": coder, "critic": judge}), *optimizers)
    for step in run.steps():
        true = images(24, 0.2)[0]
        made = coder(true)
        loss = (made - true).square().mean()
        run.update(loss - (0.1 * judge(made).mean() if step >= MIDST else 0.0), optimizers[0], clip=None)
        if step >= MIDST:
            optimizers[1].zero_grad()
            margin = F.relu(1 - judge(true)).mean() + F.relu(1 + judge(made.detach())).mean()
            run.update(margin, optimizers[1], clip=None, name="critic_loss")


def resampled_points(run: Training) -> None:
    """Trains on one set of points, drawn anew every 50 steps, as physics-informed networks do."""
    model = perceptron(2)
    optimizer = run.adam(model, 1e-3)
    points = torch.rand(64, 2)
    for step in run.steps():
        points = torch.rand(64, 2) if step % 50 == 0 else points
        run.update((model(points)[:, 0] - torch.sin(3 * points).sum(1)).square().mean(), optimizer)


def rollouts(run: Training) -> None:
    """Trains on eight minibatches of one rollout, then of the next, whose returns are larger or smaller."""
    model = perceptron(8, 4)
    optimizer = run.adam(model, 1e-3)
    level = 1.0
    for step in run.steps():
        level = 0.85 + 0.3 * random.random() if step % 8 == 0 else level
        seen = torch.randn(32, 8)
        run.update((model(seen) - level * 4 * torch.sin(seen[:, :4]) - torch.randn(32, 4)).square().mean(), optimizer)


def epochs_of_rollouts(run: Training) -> None:
    """Trains by proximal updates: four epochs of eight shuffled minibatches of each rollout of a policy."""
    train_policy(run, PointPolicy(), points=32, epochs=4, minibatches=8)


def methods_of_a_policy(run: Training) -> None:
    """Trains a policy by ten epochs of each rollout, through a method of its own, as stable-baselines3 does."""
    train_policy(run, ActingPolicy(), points=8, epochs=10, minibatches=4)


PRACTICES: Final[tuple[Practice, ...]] = (
    layer_drop,
    lion,
    clip_lowered,
    dropout_off,
    batch_ramp,
    more_micro_steps,
    longer_sequences,
    averages_for_evaluation,
    norms_frozen,
    larger_images,
    sampled_more_often,
    rare_objects,
    sharpness_aware,
    head_first,
    backbone_frozen,
    fewer_critic_updates,
    seldom_penalty,
    critic_joins,
    resampled_points,
    rollouts,
    epochs_of_rollouts,
    methods_of_a_policy,
)


def run(who: tuple[str, str, int, int]) -> tuple[str, list[tuple[str, str]]]:
    """Train with a practice; return its name, and severity and sentence of each incident."""
    name, collect, seed, steps = who
    torch.set_num_threads(1)
    logging.getLogger("trainsentry").setLevel(logging.CRITICAL + 1)
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stderr(io.StringIO()):
        training = Training(directory, COLLECT[collect], seed, steps)
        next(practice for practice in PRACTICES if practice.__name__ == name)(training)
        training.monitor.close()
        return name, [(incident.severity, incident.summary) for incident in training.monitor.incidents]


def main() -> None:
    """Print a row for each practice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--practices", default=",".join(p.__name__ for p in PRACTICES))
    parser.add_argument("--seeds", default="0-2")
    parser.add_argument("--collect", default="default", choices=COLLECT)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    first, _, last = options.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    wanted = [(n, options.collect, seed, options.steps) for n in options.practices.split(",") for seed in seeds]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        done = pool.map(run, wanted, chunksize=1)
    print(f"{options.steps} steps a run, {options.collect}, seeds {options.seeds}\n")
    print("| practice | runs | with an incident | with notes alone | the first says |\n|---|---|---|---|---|")
    for name in dict.fromkeys(name for name, _ in done):
        of_name = [found for other, found in done if other == name]
        alarms = [[text for severity, text in found if severity != "note"] for found in of_name]
        notes = sum(1 for found, alarm in zip(of_name, alarms, strict=True) if found and not alarm)
        says = next((alarm[0] for alarm in alarms if alarm), "")
        print(f"| {name} | {len(of_name)} | {sum(map(bool, alarms))} | {notes} | {says} |")
    print(f"\n{describe_machine()}")


if __name__ == "__main__":
    main()
