"""Training that is compiled runs watched as it runs unwatched: same bits, no more breaks, no graphs without end."""

import copy
import logging
import shutil

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import trainsentry
from trainsentry.collectors.torch.hooks.compiler import TRACES_GRADIENTS

needs_a_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm, self.fc, self.act = nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(inplace=True)

    def forward(self, x):
        return x + self.act(self.fc(self.norm(x)))


class Net(nn.Module):
    def __init__(self, blocks=3, *, checkpointed=False, broken=False):
        super().__init__()
        self.broken = broken
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head, self.checkpointed = nn.Linear(8, 4), checkpointed

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
            if self.broken:
                torch._dynamo.graph_break()
        return self.head(x)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def whole(**options):
    return lambda model: torch.compile(model, **options)


def each_block(**options):
    def compiler(model):
        for block in model.blocks:
            block.compile(**options)
        return model

    return compiler


def each_block_replaced(**options):
    def compiler(model):
        for i, block in enumerate(model.blocks):
            model.blocks[i] = torch.compile(block, **options)
        return model

    return compiler


def loss_function(**options):
    def compiler(model):
        def forward(x):
            return model(x)

        return torch.compile(forward, **options)

    return compiler


SAME = (6,) * 8
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


def train(model, forward, optimizer, sizes):
    generator = torch.Generator().manual_seed(1)
    losses, graphs = [], []
    for size in sizes:
        loss = forward(torch.randn(size, 8, generator=generator)).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        graphs.append(counters["stats"]["unique_graphs"])
    return losses, [p.detach().clone() for p in model.parameters()], graphs


def run(out, compiler, sizes, *, blocks=3, collect=None, **kind):
    """Train, watched where `out` is given, and on for a while unwatched."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = Net(blocks, **kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if out is None:
        forward = compiler(model)
        return (train(model, forward, optimizer, sizes), train(model, forward, optimizer, sizes)), None
    collect = collect or {"activations": {"every": 2}, "gradients": {"every": 1}}
    config = {"output_dir": str(out), "collect": collect, "on_incident": False, "strict": True}
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        forward = compiler(model)
        watched = train(model, forward, optimizer, sizes)
        records = monitor.records()
    return (watched, train(model, forward, optimizer, sizes)), records


def assert_unharmed(tmp_path, compiler, sizes, **kwargs):
    """Same bits while watched and after, no more breaks, two graphs for one, none that comes late or at the end."""
    bare, _ = run(None, compiler, sizes, **kwargs)
    breaks = dict(counters["graph_break"])
    watched, records = run(tmp_path, compiler, sizes, **kwargs)
    assert dict(counters["graph_break"]) == breaks
    for (losses, weights, _), (bare_losses, bare_weights, _) in zip(watched, bare, strict=True):
        assert losses == bare_losses
        assert all(torch.equal(a, b) for a, b in zip(weights, bare_weights, strict=True))
    (_, _, during), (_, _, after) = watched
    assert during[-1] <= 2 * bare[0][2][-1]
    assert len(set(during[2 * (len(set(sizes)) + 1) :])) == 1  # each size has been sampled and not sampled by then
    assert set(after) == {during[-1]}
    return records


@pytest.mark.parametrize("case", CASES)
def test_compiled_training_is_what_it_is_unwatched(tmp_path, case):
    records = assert_unharmed(tmp_path, *CASES[case])
    outputs = records[records.quantity == "activation_output"]
    assert {"blocks.1.fc.output.0", "blocks.2.output.0"} <= set(outputs.name) | {
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
    """What inductor rounds or adds up otherwise as soon as a value inside is read."""

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


def test_what_is_not_read_inside_fused_graphs_is_said_in_one_line(tmp_path, caplog):
    def fuses(graph, inputs):
        return graph.forward

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"output_dir": str(tmp_path), "collect": {"activations": {"every": 1}}, "strict": True}
    with (
        caplog.at_level(logging.WARNING, "trainsentry"),
        trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor,
    ):
        train(model, torch.compile(model, backend=fuses, fullgraph=True), optimizer, SAME)
        assert "output.0" in set(monitor.records().name)
        assert "blocks.1.fc.output.0" not in set(monitor.records().name)
    told = [r.message for r in caplog.records if "collect.activations.inside_graphs" in r.message]
    assert len(told) == 1
    assert "fuses" in told[0]


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


def test_runs_one_after_another_share_graphs_and_limits(tmp_path):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    forward = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    counted = []
    for i in range(4):
        config = {"output_dir": str(tmp_path / str(i)), "collect": {"activations": {"every": 2}}, "strict": True}
        with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
            train(model, forward, optimizer, (3, 4, 5, 6) * 2)
            assert "blocks.1.fc.output.0" in set(monitor.records().name)
        counted.append(counters["stats"]["unique_graphs"])
    assert set(counted) == {counted[0]}


def test_a_second_model_in_one_process(tmp_path):
    """As a GAN has, or a script that compares modes: the compiler has seen our hooks before."""
    for i in range(3):
        torch.manual_seed(i)
        model = Net(i + 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = {"output_dir": str(tmp_path / str(i)), "collect": {"activations": {"every": 2}}, "strict": True}
        with trainsentry.TrainMonitor(config).watch(model, optimizer):
            train(model, torch.compile(model, backend="aot_eager", fullgraph=True), optimizer, SAME)


def test_a_copy_that_is_watched_takes_no_site_of_the_original(tmp_path):
    """As an average of weights does, made by deepcopy while the original is watched."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"collect": {"activations": {"every": 1}}, "strict": True}
    with trainsentry.TrainMonitor({**config, "output_dir": str(tmp_path / "one")}).watch(model, optimizer) as one:
        other = copy.deepcopy(model)
        moved = torch.optim.SGD(other.parameters(), lr=0.1)
        with trainsentry.TrainMonitor({**config, "output_dir": str(tmp_path / "two")}).watch(other, moved) as two:
            train(model, torch.compile(model, backend="aot_eager"), optimizer, SAME)
            train(other, torch.compile(other, backend="aot_eager"), moved, SAME[:3])
            for monitor, steps in ((one, len(SAME)), (two, 3)):
                records = monitor.records()
                assert set(records[records.name == "blocks.1.fc.output.0"].step) == set(range(steps))


def test_two_monitors_of_one_compiled_model(tmp_path):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"collect": {"activations": {"every": 2}}, "strict": True}
    with (
        trainsentry.TrainMonitor({**config, "output_dir": str(tmp_path / "one")}).watch(model, optimizer) as one,
        trainsentry.TrainMonitor({**config, "output_dir": str(tmp_path / "two")}).watch(model, optimizer) as two,
    ):
        train(model, torch.compile(model, backend="aot_eager", fullgraph=True), optimizer, SAME)
        for monitor in (one, two):
            assert "blocks.1.fc.output.0" in set(monitor.records().name)


def test_a_monitor_that_is_closed_leaves_no_hook_on_eager_modules_and_holds_nothing(tmp_path):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trainsentry.TrainMonitor({"output_dir": str(tmp_path), "strict": True}).watch(model, optimizer):
        train(model, model, optimizer, SAME)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_hooks_left_in_graphs_belong_to_nobody(tmp_path):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    forward = torch.compile(model, backend="eager", fullgraph=True)
    with trainsentry.TrainMonitor({"output_dir": str(tmp_path), "strict": True}).watch(model, optimizer):
        train(model, forward, optimizer, SAME)
    left = [hook for m in model.modules() for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    assert left
    assert all(hook.owner is None and not hook.switch.sampling for hook in left)


def test_containers_that_are_never_called_are_not_said_to_be_unseen(tmp_path, caplog):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"output_dir": str(tmp_path), "collect": {"activations": {"every": 1}}, "strict": True}
    with (
        caplog.at_level(logging.WARNING, "trainsentry"),
        trainsentry.TrainMonitor(config).watch(model, optimizer),
    ):
        train(model, torch.compile(model, backend="aot_eager"), optimizer, SAME)
    assert not [r for r in caplog.records if "no activation" in r.message]


@pytest.mark.skipif(TRACES_GRADIENTS, reason="this torch shows them")
def test_gradients_that_this_torch_does_not_show_are_said_in_one_line(tmp_path, caplog):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        caplog.at_level(logging.WARNING, "trainsentry"),
        trainsentry.TrainMonitor({"output_dir": str(tmp_path)}).watch(model, optimizer),
    ):
        train(model, torch.compile(model, backend="aot_eager"), optimizer, SAME)
    told = [r.message for r in caplog.records if "need torch 2.13 or later" in r.message]
    assert len(told) == 1


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
    assert sum("compiled autograd makes one graph" in r.message for r in caplog.records) == 1
    bare_losses, bare_graphs = trained(None)
    assert losses == bare_losses
    assert graphs <= 2 * bare_graphs
