"""A replay blames the device only where nothing else explains a difference from the step."""

import logging
from types import SimpleNamespace

import pytest
import torch
from replayed import AT, NOT_COMPARED, STEPS, Dense, corrupt_once, forget_graphs, made, rows, train
from torch import nn

import trainsentry
from trainsentry.collectors.guard import Guard
from trainsentry.collectors.torch.kept_tensors import KeptTensors
from trainsentry.collectors.torch.replaying import Replay
from trainsentry.collectors.torch.sharding.model_names import ModelNames


@pytest.fixture(autouse=True)
def _without_graphs():
    forget_graphs()


def wide():
    """Return two layers with more elements than copies are kept of."""
    return nn.Sequential(nn.Linear(6, 100), nn.Linear(100, 60))


def test_one_changed_element_is_seen_by_its_version(out, tmp_path):
    def output(step, output):
        output.detach().view(-1)[1] += 1

    [action] = train(out, made(wide), after=output)
    assert f"{NOT_COMPARED}its outputs were changed in place since" in action, action
    model = made(wide)

    def weight(step, output):
        model[0].weight.detach()[0, 1] += 1

    [action] = train(tmp_path, model, after=weight)
    assert f"{NOT_COMPARED}weights or buffers were changed since the pass began" in action, action


@pytest.mark.parametrize("counted", [True, False])
def test_outputs_that_were_changed_in_place_are_not_compared(out, counted):
    """Kernels of other libraries overwrite logits by their gradients, which autograd does not count."""

    def after(step, output):
        (output if counted else output.data).mul_(1.5)

    [action] = train(out, made(Dense), after=after)
    assert f"{NOT_COMPARED}its outputs were changed in place since" in action, action


def test_inputs_that_autograd_did_not_see_changing_are_not_compared(out):
    kept = []

    def batch(generator):
        kept.append(rows(generator))
        return kept[-1]

    [action] = train(out, made(Dense), batch, after=lambda step, output: kept[-1].data.mul_(2))
    assert f"{NOT_COMPARED}its inputs were changed in place since" in action, action


@pytest.mark.parametrize("fused", [False, True])
def test_after_the_update_nothing_is_compared(out, monkeypatch, fused):
    """A fused optimizer changes no version of the weights."""
    sgd = torch.optim.SGD
    monkeypatch.setattr(torch.optim, "SGD", lambda parameters, lr: sgd(parameters, lr, fused=fused))
    [action] = train(out, made(Dense), same_step=False)
    assert f"{NOT_COMPARED}the weights were updated since" in action, action


@pytest.mark.parametrize("through_data", [True, False])
def test_an_update_by_hand_is_noticed(out, through_data):
    model = made(Dense)
    config = {"output_dir": str(out), "strict": True, "on_incident": {"dump": {"replay": True}}}
    generator = torch.Generator().manual_seed(1)
    with trainsentry.TrainMonitor(config).watch(model) as monitor:
        for step in range(STEPS):
            model(rows(generator)).square().mean().backward()
            if step == AT:
                model.first.bias.grad[0] = float("nan")
            with torch.no_grad():
                for p in model.parameters():
                    (p.data if through_data else p).sub_(p.grad, alpha=1e-2)
            monitor.step()
            for p in model.parameters():
                p.grad = None
        monitor.flush()
        [action] = [a for i in monitor.incidents for a in i.actions if a.startswith("replay")]
    assert f"{NOT_COMPARED}weights or buffers were changed since the pass began" in action, action


class Codebook(nn.Module):
    """Computes with an entry of a buffer, and sets it to its inputs' mean through `.data`: no version changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.zeros(1000, 6))

    def forward(self, x):
        y = x + self.codes[1]
        self.codes.data[1] = x.detach().mean(0)
        return y


class LargeCodebook(nn.Module):
    """Moves one of so many elements that no copy of some elements has it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.zeros(20_000, 6))

    def forward(self, x):
        y = x + self.codes[1]
        self.codes.data[1, 1] += x.detach().mean()
        return y


class ReplacedBuffer(nn.Module):
    """Has another tensor as its buffer after each pass."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        y = x - self.mean
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return y


class Difference(nn.Module):
    """Computes with the last pass's input, so that each re-run gives the same and the step had something else."""

    def __init__(self):
        super().__init__()
        self.before = None

    def forward(self, x):
        y = x if self.before is None else x - self.before
        self.before = x.detach()
        return y


class EveryFourteenth(nn.Module):
    """Computes otherwise in one pass of fourteen, by a counter of its own."""

    def __init__(self):
        super().__init__()
        self.passes = 0

    def forward(self, x):
        self.passes += 1
        return x * 2 if self.passes % (AT + 1) == 0 else x


class OfAnObject(nn.Module):
    """Keeps a result in its input, an object."""

    def __init__(self):
        super().__init__()
        self.net = Dense()

    def forward(self, graph):
        graph.x = torch.ones_like(graph.x) if graph.seen else graph.x
        graph.seen = True
        return self.net(graph.x)


def as_object(generator):
    return SimpleNamespace(x=rows(generator), seen=False)


@pytest.mark.parametrize(
    ("kind", "batch", "why"),
    [
        (lambda: Dense(Codebook()), rows, "weights or buffers were changed since the pass began"),
        (lambda: Dense(LargeCodebook()), rows, "the pass changes the buffer codes of a LargeCodebook"),
        (lambda: Dense(ReplacedBuffer()), rows, "weights or buffers were changed since the pass began"),
        (lambda: Dense(EveryFourteenth()), rows, "extra.passes was changed since the pass began"),
        (lambda: Dense(Difference()), rows, "extra.before was changed since the pass began"),
        (OfAnObject, as_object, "its inputs have a SimpleNamespace, whose changes cannot be seen"),
    ],
)
def test_a_pass_with_a_state_of_its_own_blames_nothing(out, tmp_path, kind, batch, why):
    model, plain = made(kind), made(kind)
    [action] = train(out, model, batch)
    assert NOT_COMPARED in action, action
    assert why in action, action
    train(tmp_path, plain, batch, watched=False)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_a_mode_or_a_setting_that_was_changed_since_blames_nothing(out, tmp_path):
    model = made(Dense)
    around = corrupt_once(model.last)

    def after(step, output):
        around["after"](step, output)
        model.extra.train(step != AT)

    [action] = train(out, model, before=around["before"], after=after)
    assert "modules were switched between training and evaluation since" in action, action

    def settings(step, output):
        around["after"](step, output)
        torch.backends.mkldnn.set_flags(step != AT)

    try:
        model = made(Dense)
        around = corrupt_once(model.last)
        [action] = train(tmp_path, model, before=around["before"], after=settings)
    finally:
        torch.backends.mkldnn.set_flags(True)
    assert "settings of torch were changed since" in action, action


def test_a_compiled_part_blames_nothing(out):
    model = made(Dense)
    model.extra.compile(backend="eager")
    [action] = train(out, model, **corrupt_once(model.last))
    assert "torch.compile is at work" in action, action


# ---------------------------------------------------------------------- refused, released, contained


def test_a_sharded_model_is_not_replayed(out):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = fully_shard(made(Dense), mesh=init_device_mesh("cpu", (1,)))
        [action] = train(out, model)
    finally:
        torch.distributed.destroy_process_group()
    assert action == "replay: not done: the model is sharded: other ranks would have to take part"


def test_outputs_are_kept_until_the_next_pass_or_update_only():
    model, names = made(Dense), ModelNames()
    names.add([model])
    replay = Replay(names, Guard(strict=True), None, several_ranks=False)

    def kept():
        return [] if replay._outputs is None else [tensor.data_ptr() for tensor in replay._outputs.tensors]

    output = model(torch.ones(2, 6))
    assert kept() == [output.data_ptr()]
    model.register_forward_pre_hook(lambda *_: during.append(kept()))
    during = []
    output = model(torch.ones(2, 6))
    assert during == [[]]
    with torch.no_grad():
        model(torch.ones(2, 6))
    assert kept() == [output.data_ptr()]
    replay.note_update()
    assert kept() == []
    output = model(torch.ones(2, 6))
    replay.close()
    assert kept() == []


def test_a_failure_of_the_comparison_leaves_the_training_as_it_is(out, tmp_path, monkeypatch, caplog):
    model, plain = made(Dense), made(Dense)

    def fail(value):
        raise RuntimeError("cannot keep this")

    monkeypatch.setattr(KeptTensors, "of", fail)
    with caplog.at_level(logging.ERROR, "trainsentry"):
        actions = train(out, model, strict=False)
    assert actions == ["replay: not done: no forward pass was seen"]
    assert "replay failed and is switched off; training goes on" in caplog.text
    train(tmp_path, plain, watched=False)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
