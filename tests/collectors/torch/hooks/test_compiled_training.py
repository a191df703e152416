"""Compiled training gives the same bits when watched, with no more graph breaks and a bounded number of graphs."""

import logging

import pytest
import torch
from compiled_models import (
    SAME,
    Net,
    assert_unharmed,
    each_block,
    each_block_replaced,
    loss_function,
    needs_a_compiler,
    run,
    train,
    whole,
)
from torch import nn
from torch._dynamo.utils import counters

import trainsentry
from trainsentry.collectors.torch.hooks.compiler import TRACES_GRADIENTS

pytestmark = pytest.mark.usefixtures("fresh_compiler")


FIVE_SIZES = (2, 3, 4, 5, 7) * 3


CASES = {
    "whole": (whole(backend="aot_eager"), SAME),
    "whole, fullgraph": (whole(backend="aot_eager", fullgraph=True), SAME),
    "whole, dynamic": (whole(backend="aot_eager", dynamic=True, fullgraph=True), FIVE_SIZES),
    "whole, sizes that vary": (whole(backend="aot_eager"), FIVE_SIZES),
    "whole, a graph a size": (whole(backend="aot_eager", fullgraph=True, dynamic=False), FIVE_SIZES),
    "the backend that only traces": (whole(backend="eager", fullgraph=True), SAME),
    "each block": (each_block(backend="aot_eager"), SAME),
    "each block, fullgraph": (each_block(backend="aot_eager", fullgraph=True), SAME),
    "each block, fullgraph and dynamic": (each_block(backend="aot_eager", fullgraph=True, dynamic=True), FIVE_SIZES),
    "each block replaced, fullgraph": (each_block_replaced(backend="aot_eager", fullgraph=True), SAME),
    "a function that calls the model": (loss_function(backend="aot_eager", fullgraph=True), SAME),
}


INDUCTOR = {
    "default": (whole(), SAME),
    "reduce-overhead": (whole(mode="reduce-overhead"), SAME),
    "max-autotune-no-cudagraphs": (whole(mode="max-autotune-no-cudagraphs", fullgraph=True), SAME),
    "each block, dynamic": (each_block(fullgraph=True, dynamic=True), (4, 5, 6) * 4),
}


@pytest.mark.parametrize("case", CASES)
def test_compiled_training_is_what_it_is_unwatched(tmp_path, case):
    records = assert_unharmed(tmp_path, *CASES[case])
    outputs = records[records.quantity == "activation_output"]
    assert {"blocks.0.fc.output.0", "blocks.1.output.0"} <= set(outputs.name) | {
        name.replace("_orig_mod.", "") for name in outputs.name
    }
    assert set(outputs.step) == {step for step in range(len(CASES[case][1])) if step % 2 == 0}
    has_gradients = "blocks.1.fc.output.0" in set(records[records.quantity == "activation_grad_output"].name)
    assert has_gradients == TRACES_GRADIENTS


@pytest.mark.slow
@needs_a_compiler
@pytest.mark.parametrize("case", INDUCTOR)
def test_inductor_gives_the_bits_of_the_unwatched_run(tmp_path, case):
    if " " in str(tmp_path) or " " in torch.__file__:
        pytest.skip("inductor cannot link in a folder with a space in its name")
    records = assert_unharmed(tmp_path, *INDUCTOR[case])
    assert {"output.0", "blocks.0.output.0"} & set(records.name)  # what comes out of a graph


class Fused(nn.Module):
    """Layers that inductor fuses: reading a value inside changes how it rounds and sums."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.head = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))

    def forward(self, x):
        return self.head(self.net(x))


@pytest.mark.slow
@needs_a_compiler
@pytest.mark.parametrize("bf16", [False, True])
def test_what_inductor_fuses_keeps_its_last_bits(tmp_path, bf16):
    if " " in str(tmp_path) or " " in torch.__file__:
        pytest.skip("inductor cannot link in a folder with a space in its name")

    def trained(out):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Fused()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        monitor = None
        if out is not None:
            config = {"output_dir": str(out), "collect": {"activations": {"every": 2}}, "strict": True}
            monitor = trainsentry.TrainMonitor(config).watch(model, optimizer)
        forward, losses = torch.compile(model), []
        for i in range(4):
            x = torch.randn(8, 3, 12, 12, generator=torch.Generator().manual_seed(i))
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = forward(x).float().square().mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        if monitor is not None:
            monitor.close()
        return losses

    assert trained(tmp_path) == trained(None)


def test_checkpoints_inside_a_graph(tmp_path):
    assert_unharmed(tmp_path, whole(backend="aot_eager", fullgraph=True), SAME, checkpointed=True)


def test_modules_between_two_graphs_are_left_uncompiled(tmp_path):
    """A graph break in a loop: the blocks are compiled, the head is not, and our hooks are no reason to do so."""
    assert_unharmed(tmp_path, whole(backend="aot_eager"), SAME, broken=True)


def test_blocks_of_one_class_share_their_graphs(tmp_path):
    bare, _ = run(None, each_block(backend="aot_eager", fullgraph=True), SAME, blocks=12)
    assert bare[0][2][-1] == 2  # the first block's input needs no gradient
    watched, _ = run(tmp_path, each_block(backend="aot_eager", fullgraph=True), SAME, blocks=12)
    assert watched[0][2][-1] == 4  # each with sampling and without


def test_as_many_shapes_as_the_compiler_allows_are_allowed_watched_and_after(tmp_path):
    sizes = (*range(2, 10), 2) * 3  # eight of them, dynamo's limit; nine steps a round, so that each is sampled once
    assert_unharmed(tmp_path, whole(backend="eager", fullgraph=True, dynamic=False), sizes)


def test_a_compiled_optimizer_gives_the_same_bits(tmp_path):
    def trained(out):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        monitor = None
        if out is not None:
            monitor = trainsentry.TrainMonitor({"output_dir": str(out), "strict": True}).watch(model, optimizer)
        optimizer.step = torch.compile(optimizer.step, backend="aot_eager")
        losses, weights, _ = train(model, model, optimizer, SAME)
        if monitor is not None:
            assert set(monitor.records().step) == set(range(len(SAME)))
            monitor.close()
        return losses, weights

    (losses, weights), (bare_losses, bare_weights) = trained(tmp_path), trained(None)
    assert losses == bare_losses
    assert all(torch.equal(a, b) for a, b in zip(weights, bare_weights, strict=True))


@pytest.mark.parametrize("compiled_forward", [False, True])
def test_compiled_autograd_gives_the_same_bits_and_says_what_it_hides(tmp_path, caplog, compiled_forward):
    from torch._dynamo import compiled_autograd

    def trained(out):
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = None
        if out is not None:
            config = {"output_dir": str(out), "collect": {"activations": {"every": 2}, "gradients": {"every": 1}}}
            monitor = trainsentry.TrainMonitor({**config, "strict": True}).watch(model, optimizer)
        forward = torch.compile(model, backend="aot_eager") if compiled_forward else model
        losses, generator = [], torch.Generator().manual_seed(1)
        for _ in range(8):
            loss = forward(torch.randn(4, 8, generator=generator)).square().mean()
            with compiled_autograd._enable(lambda graph: torch.compile(graph, backend="aot_eager")):
                loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        graphs = counters["compiled_autograd"]["captures"]
        if monitor is not None:
            assert set(monitor.records().step) == set(range(8))
            assert "head.weight" in monitor.metrics("gradient")
            monitor.close()
        return losses, graphs

    with caplog.at_level(logging.WARNING, "trainsentry"):
        losses, graphs = trained(tmp_path)
    assert sum("compiled autograd compiles the backward pass" in r.message for r in caplog.records) == 1
    bare_losses, bare_graphs = trained(None)
    assert losses == bare_losses
    assert graphs <= 2 * bare_graphs
