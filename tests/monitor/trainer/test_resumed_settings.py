"""After a resume the first step says what the run is set to otherwise, and nothing where all is as it was."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from tiny_models import Gpt, ResNet
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import trainsentry
from trainsentry.collectors.torch.operations.pass_operations import NUMBERS_NODES

SAVED = 24
"""The step of the checkpoint; the form of passes is known after ten steps alike, writes of gradients after twenty."""


class Run:
    """A training run of one family, with what a program chooses when it begins or goes on."""

    def __init__(self, family, *, edit=None, optimizer=torch.optim.AdamW, batch=4, passes=1, autocast=None, clip=False):
        torch.manual_seed(0)
        self.family, self.batch, self.passes, self.autocast, self.clip = family, batch, passes, autocast, clip
        self.set_to_none = True
        self.model = family()
        if edit is not None:
            self.model = edit(self.model) or self.model
        self.optimizer = optimizer(self.model.parameters(), lr=1e-3)

    def loss(self, step, batch):
        torch.manual_seed(step)
        if self.family is Gpt:
            tokens = torch.randint(64, (batch, 9))
            return F.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        return F.cross_entropy(self.model(torch.randn(batch, 3, 8, 8)), torch.randint(10, (batch,)))

    def train(self, first, steps, batch=None):
        for step in range(first, first + steps):
            for _ in range(self.passes):
                with torch.autocast("cpu", self.autocast or torch.bfloat16, enabled=self.autocast is not None):
                    loss = self.loss(step, batch(step) if batch else self.batch)
                loss.backward()
            if self.clip:
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=self.set_to_none)

    def state(self, monitor):
        parts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        file = io.BytesIO()
        torch.save(copy.deepcopy({**parts, "monitor": monitor.state_dict()}), file)
        file.seek(0)
        return torch.load(file)


def saved_by(run, out, batch=None, before_saving=lambda model: None, **config):
    config = {"output_dir": str(out / "first"), "strict": True, **config}
    with trainsentry.TrainMonitor(config).watch(run.model, run.optimizer) as monitor:
        run.train(0, SAVED, batch)
        before_saving(run.model)
        return run.state(monitor)


def resumed(run, state, out, load_optimizer=True, **config):
    """Go on from a state; return what is said of the settings."""
    run.model.load_state_dict(state["model"], strict=False)
    if load_optimizer:
        run.optimizer.load_state_dict(state["optimizer"])
    monitor = trainsentry.TrainMonitor({"output_dir": str(out / "second"), "strict": True, **config})
    monitor.load_state_dict(state["monitor"])
    with monitor.watch(run.model, run.optimizer):
        run.train(SAVED, 3)
        monitor.flush()
        ending = f" when step {SAVED} was saved (resumed at step {SAVED})"
        said = [suspect.evidence for incident in monitor.incidents for suspect in incident.suspects]
        assert {(i.severity, i.step) for i in monitor.incidents} <= {("warning", SAVED)}
    return [sentence.removesuffix(ending) for sentence in said if sentence.endswith(ending)]


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    found = {}

    def get(family):
        if family not in found:
            found[family] = saved_by(Run(family), tmp_path_factory.mktemp("saved"))
        return copy.deepcopy(found[family])

    return get


def dropout(model):
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3


def relu(model):
    for block in model.blocks:
        block.mlp[1] = nn.ReLU()


def momentum(model):
    model.layers[0].bn1.momentum = 0.5


def frozen(name):
    def edit(model):
        dict(model.named_parameters())[name].requires_grad_(False)

    return edit


def evaluated(model):
    model.eval()


CHANGES = {
    "dropout": (Gpt, {"edit": dropout}, "p of module blocks.0.dropout (and 1 other) is 0.3, and was 0.1"),
    "another activation": (Gpt, {"edit": relu}, "module blocks.0.mlp.1 (and 1 other) is a ReLU, and was a GELU"),
    "batch norm": (ResNet, {"edit": momentum}, "momentum of module layers.0.bn1 is 0.5, and was 0.1"),
    "frozen": (
        ResNet,
        {"edit": frozen("layers.0.conv1.weight")},
        "parameter layers.0.conv1.weight requires no gradient, and did",
    ),
    "smaller batch": (
        ResNet,
        {"batch": 2},
        "the model's input.0 is float32 [2, 3, 8, 8], and was float32 [4, 3, 8, 8]",
    ),
    "smaller batch of tokens": (Gpt, {"batch": 2}, "the model's input.0 is int64 [2, 8], and was int64 [4, 8]"),
    "accumulation": (Gpt, {"passes": 3}, "a step has 3 forward passes, and had 1"),
    "autocast": (ResNet, {"autocast": torch.bfloat16}, "autocast is bfloat16, and was off"),
    "optimizer": (Gpt, {"optimizer": torch.optim.Adam}, "the optimizer is Adam, and was AdamW"),
    "clipping begins": (
        ResNet,
        {"clip": True},
        (
            "gradients are written 1 time before an update (as where clipping is added, or gradients are kept), "
            "and were 0 times"
        ),
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_setting_that_is_another_after_the_resume_is_named_with_both_values(states, out, what):
    family, settings, sentence = CHANGES[what]
    assert resumed(Run(family, **settings), states(family), out) == [sentence]


@pytest.mark.parametrize("family", [Gpt, ResNet])
@pytest.mark.parametrize(("set_to_none", "were"), [(True, "1 time"), (False, "1 or 3 times")])
def test_clipping_that_a_resumed_run_forgets_is_told_and_clipping_that_goes_on_is_not(out, family, set_to_none, were):
    before, after = Run(family, clip=True), [Run(family, clip=clip) for clip in (True, False)]
    for run in (before, *after):
        run.set_to_none = set_to_none
    state = saved_by(before, out)
    assert resumed(after[0], state, out / "as it was") == []
    [sentence] = resumed(after[1], state, out / "forgotten")
    reason = "as where clipping is left out"
    assert sentence == f"gradients are written 0 times before an update ({reason}), and were {were}"


def test_a_young_checkpoint_and_another_length_of_an_unrolled_cell_say_nothing_of_writes(out):
    """Autograd sums the uses of a weight in place, so a longer sequence has more writes."""

    class Unrolled(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.Linear(4, 4)

        def forward(self, x):
            for _ in range(x.shape[1]):
                x = self.cell(x)
            return x

    class Sequences(Run):
        def loss(self, step, batch):
            torch.manual_seed(step)
            return self.model(torch.randn(3, batch, 4)).square().mean()

    state = saved_by(Sequences(Unrolled, batch=2), out)
    assert not any("written" in said for said in resumed(Sequences(Unrolled, batch=5), state, out / "longer"))
    young = Run(ResNet, clip=True)
    with trainsentry.TrainMonitor({"output_dir": str(out / "young"), "strict": True}).watch(
        young.model, young.optimizer
    ) as m:
        young.train(0, 12)
        state = young.state(m)
    state["monitor"]["step"] = SAVED
    assert not any("written" in said for said in resumed(Run(ResNet), state, out / "young resumed"))


@pytest.mark.parametrize("family", [Gpt, ResNet])
def test_a_model_left_in_evaluation_mode_is_named(states, out, family):
    run = Run(family, edit=evaluated)
    [sentence] = resumed(run, states(family), out)
    others = len(list(run.model.modules())) - 1
    words = "is in evaluation mode, and was in training mode"
    assert sentence in {f"the model (and {n} others) {words}" for n in (others, others - 1)}


@pytest.mark.parametrize("family", [Gpt, ResNet])
def test_a_run_that_goes_on_as_it_was_is_told_nothing(states, out, family):
    assert resumed(Run(family), states(family), out) == []


def test_a_checkpoint_saved_in_evaluation_mode_remembers_how_the_model_trained(out):
    state = saved_by(Run(Gpt), out, before_saving=evaluated)
    assert resumed(Run(Gpt), state, out) == []


def test_sequences_and_batches_of_varying_size_have_no_form(out):
    state = saved_by(Run(Gpt), out, batch=lambda step: 2 + step % 3)
    assert resumed(Run(Gpt, batch=7), state, out) == []


def test_a_small_step_of_a_schedule_is_no_change(states, out):
    def lower(model):
        for block in model.blocks:
            block.dropout.p = 0.09

    assert resumed(Run(Gpt, edit=lower), states(Gpt), out) == []


def test_a_class_that_a_wrapper_derives_while_the_program_runs_is_the_module_s_own(states, out):
    def normalise(model):
        for block in model.blocks:
            nn.utils.parametrizations.weight_norm(block.mlp[0])

    run = Run(Gpt, edit=normalise)
    assert type(run.model.blocks[0].mlp[0]).__name__ == "ParametrizedLinear"
    assert resumed(run, states(Gpt), out, load_optimizer=False) == []


def test_a_compiled_model_is_no_change(states, out):
    state = states(ResNet)
    run = Run(ResNet)
    run.model.compile(backend="eager")
    assert resumed(run, state, out) == []


class TwoPasses(Run):
    """A second optimizer has a pass of its own, after the first one's update."""

    def __init__(self, family):
        super().__init__(family)
        parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(parameters[:4], lr=1e-3)
        self.other = torch.optim.AdamW(parameters[4:], lr=1e-3)

    def train(self, first, steps, batch=None):
        for step in range(first, first + steps):
            for optimizer in (self.optimizer, self.other):
                self.loss(step, self.batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                self.other.zero_grad()


@pytest.mark.parametrize("family", [Gpt, ResNet])
def test_passes_between_the_updates_of_two_optimizers_are_no_change(out, family):
    run = TwoPasses(family)
    config = {"output_dir": str(out / "first"), "strict": True}
    with trainsentry.TrainMonitor(config).watch(run.model, [run.optimizer, run.other]) as monitor:
        run.train(0, SAVED)
        state = run.state(monitor)
        other = copy.deepcopy(run.other.state_dict())
    again = TwoPasses(family)
    again.model.load_state_dict(state["model"])
    again.optimizer.load_state_dict(state["optimizer"])
    again.other.load_state_dict(other)
    monitor = trainsentry.TrainMonitor({"output_dir": str(out / "second"), "strict": True})
    monitor.load_state_dict(state["monitor"])
    with monitor.watch(again.model, [again.optimizer, again.other]):
        again.train(SAVED, 3)
        monitor.flush()
        assert monitor.incidents == ()


def test_a_pass_in_evaluation_mode_with_gradients_counts_for_nothing(states, out):
    def looked_at(model):
        model.eval()
        model(torch.randint(64, (1, 8)))
        model.train()

    run = Run(Gpt)
    train = run.train

    def train_after_a_look(first, steps, batch=None):
        looked_at(run.model)
        train(first, steps, batch)

    run.train = train_after_a_look
    assert resumed(run, states(Gpt), out) == []


ACTIVATIONS = {"activations": {"every": 1}}


def unscaled(model):
    attention = model.blocks[1].attn

    def forward(x):
        q, k, v = attention.qkv(x).chunk(3, dim=-1)
        return attention.proj(F.softmax((q @ k.mT).tril(), -1) @ v)

    attention.forward = forward


def scaled_shortcut(model):
    block = model.layers[0]
    block.forward = lambda x: block.relu(block.bn2(block.conv2(block.relu(block.bn1(block.conv1(x))))) + x * 0.5)


CODE = {
    "attention": (Gpt, unscaled, "module blocks.1.attn computes otherwise (with "),
    "shortcut": (ResNet, scaled_shortcut, "module layers.0 computes otherwise (with mul) than"),
}


@pytest.fixture(scope="module")
def states_with_activations(tmp_path_factory):
    return {
        family: saved_by(Run(family), tmp_path_factory.mktemp("saved"), collect=ACTIVATIONS) for family in (Gpt, ResNet)
    }


@pytest.mark.skipif(not NUMBERS_NODES, reason="this torch does not number the nodes of a graph")
@pytest.mark.parametrize("what", CODE)
def test_code_that_is_other_after_the_resume_is_named_by_its_operations(states_with_activations, out, what):
    family, edit, sentence = CODE[what]
    state = copy.deepcopy(states_with_activations[family])
    [said] = resumed(Run(family, edit=edit), state, out, collect=ACTIVATIONS)
    assert said.startswith(sentence)


@pytest.mark.parametrize("family", [Gpt, ResNet])
def test_code_that_is_the_same_and_what_other_software_computes_is_told_nothing(states_with_activations, out, family):
    state = copy.deepcopy(states_with_activations[family])
    assert resumed(Run(family), state, out, collect=ACTIVATIONS) == []
    text = state["monitor"]["fingerprints"]
    assert f'"torch {torch.__version__} on cpu"' in text
    state["monitor"]["fingerprints"] = text.replace(f"torch {torch.__version__} on cpu", "torch 2.6.0 on cuda")
    edit = unscaled if family is Gpt else scaled_shortcut
    assert resumed(Run(family, edit=edit), state, out, collect=ACTIVATIONS) == []


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(model):
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


@pytest.mark.parametrize(("first", "then"), [(sharded, None), (None, sharded), (sharded, sharded)])
def test_a_run_that_goes_on_with_or_without_sharding_is_told_nothing(one_rank, out, first, then):
    """FSDP2 adds functions of its own to the graph of autograd."""
    state = saved_by(Run(Gpt, edit=first), out, collect=ACTIVATIONS)["monitor"]
    run = Run(Gpt, edit=then)
    parts = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict(), "monitor": state}
    assert resumed(run, parts, out, collect=ACTIVATIONS) == []


def test_modules_that_are_computed_again_in_the_backward_pass_are_told_nothing(states_with_activations, out):
    def checkpointed(model):
        for block in model.blocks:
            forward = block.forward
            block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=True)

    state = copy.deepcopy(states_with_activations[Gpt])
    assert resumed(Run(Gpt, edit=checkpointed), state, out, collect=ACTIVATIONS) == []


def test_a_state_of_an_earlier_version_has_no_settings(states, out):
    state = states(Gpt)
    text = state["monitor"]["fingerprints"]
    state["monitor"]["fingerprints"] = text[: text.index(',"settings"')] + "}"
    assert resumed(Run(Gpt, edit=dropout), state, out) == []
