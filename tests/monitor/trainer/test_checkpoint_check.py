"""After a resume the first step says which tensors are not what was saved, and nothing where all are."""

import copy
import io

import pytest
import torch
from tiny_models import Gpt, ResNet, train
from torch import nn

import trainsentry
from trainsentry.anomaly.anomaly import CHECKPOINT_MISMATCH

FIRST, SECOND = 4, 8
"""The steps of the two checkpoints."""


FAMILIES = [(Gpt, torch.optim.AdamW), (ResNet, torch.optim.SGD), (ResNet, torch.optim.AdamW), (Gpt, torch.optim.SGD)]

families = pytest.mark.parametrize(
    ("make", "optimizer"), FAMILIES, ids=lambda x: x.__name__ if isinstance(x, type) else None
)
TWINS = {
    Gpt: ("blocks.0.attn.qkv.weight", "blocks.1.attn.qkv.weight"),
    ResNet: ("layers.0.conv1.weight", "layers.1.conv1.weight"),
}


def parts(make, seed=0, optimizer=torch.optim.AdamW):
    """Return a model and its optimizer."""
    torch.manual_seed(seed)
    model = make()
    return model, optimizer(model.parameters(), lr=1e-2, **({"momentum": 0.9} if optimizer is torch.optim.SGD else {}))


def checkpoint(model, optimizer, monitor):
    """Return what a user saves, through torch.save and torch.load."""
    file = io.BytesIO()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "monitor": monitor.state_dict()}
    torch.save(copy.deepcopy(saved), file)
    file.seek(0)
    return torch.load(file)


def saved_run(out, make, optimizer=torch.optim.AdamW):
    """Train and save twice; return both checkpoints."""
    model, opt = parts(make, optimizer=optimizer)
    with trainsentry.TrainMonitor({"output_dir": str(out), "strict": True}).watch(model, opt) as monitor:
        train(model, opt, FIRST, monitor)
        older = checkpoint(model, opt, monitor)
        train(model, opt, SECOND - FIRST, monitor)
        return older, checkpoint(model, opt, monitor)


def resumed_run(out, make, saved, optimizer=torch.optim.AdamW, steps=2, config=None):
    """Load a checkpoint into a new model as a user does, without the pieces that it lacks; return the incidents."""
    model, opt = parts(make, seed=1, optimizer=optimizer)
    settings = {"output_dir": str(out), "strict": True, **(config or {})}
    with trainsentry.TrainMonitor(settings).watch(model, opt) as monitor:
        monitor.load_state_dict(saved["monitor"])
        model.load_state_dict(saved["model"], strict=False)
        if "optimizer" in saved:
            opt.load_state_dict(saved["optimizer"])
        train(model, opt, steps, monitor)
        monitor.flush()
        return monitor.incidents


def told(incidents):
    """Return the sentences on all suspects, at most one incident's."""
    assert len(incidents) <= 1
    sentences = [suspect.evidence for incident in incidents for suspect in incident.suspects]
    ending = f" (resumed at step {incidents[0].step})" if incidents else ""
    assert all(sentence.endswith(ending) for sentence in sentences)
    return [sentence.removesuffix(ending) for sentence in sentences]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    found = {}

    def get(make, optimizer=torch.optim.AdamW):
        if (make, optimizer) not in found:
            found[make, optimizer] = saved_run(tmp_path_factory.mktemp("saved"), make, optimizer)
        return copy.deepcopy(found[make, optimizer])

    return get


@families
def test_what_was_saved_is_brought_back_without_a_word(checkpoints, out, make, optimizer):
    _, newer = checkpoints(make, optimizer)
    assert resumed_run(out, make, newer, optimizer) == ()


@families
def test_two_exchanged_layers_name_each_other(checkpoints, out, make, optimizer):
    _, saved = checkpoints(make, optimizer)
    a, b = TWINS[make]
    saved["model"][a], saved["model"][b] = saved["model"][b], saved["model"][a]
    incidents = resumed_run(out, make, saved, optimizer)
    assert [(i.kind, i.severity, i.step) for i in incidents] == [(CHECKPOINT_MISMATCH, "warning", SECOND)]
    assert set(told(incidents)) == {
        f"parameter {a} is what was saved of {b} at step {SECOND}",
        f"parameter {b} is what was saved of {a} at step {SECOND}",
    }


@families
def test_a_layer_of_an_older_checkpoint_is_named_with_its_step(checkpoints, out, make, optimizer):
    older, saved = checkpoints(make, optimizer)
    name = TWINS[make][0]
    saved["model"][name] = older["model"][name]
    words = f"is as it was in the older checkpoint of step {FIRST}, not as saved at step {SECOND}"
    assert told(resumed_run(out, make, saved, optimizer)) == [f"parameter {name} {words}"]


@families
def test_a_layer_that_is_not_loaded_and_a_changed_bit_are_named(checkpoints, out, make, optimizer):
    _, saved = checkpoints(make, optimizer)
    a, b = TWINS[make]
    del saved["model"][a]
    saved["model"][b].view(-1).view(torch.int32)[0] ^= 1
    words = f"is not what was saved at step {SECOND}"
    assert set(told(resumed_run(out, make, saved, optimizer))) == {f"parameter {a} {words}", f"parameter {b} {words}"}


def test_optimizer_state_given_to_another_parameter_is_named(checkpoints, out):
    _, saved = checkpoints(Gpt)
    names = [name for name, _ in Gpt().named_parameters()]
    a, b = (names.index(name) for name in TWINS[Gpt])
    state = saved["optimizer"]["state"]
    state[a], state[b] = state[b], state[a]
    sentences = told(resumed_run(out, Gpt, saved))
    for key in ("exp_avg", "exp_avg_sq"):
        expected = f"optimizer state {key} of {names[a]} is what was saved of {names[b]} at step {SECOND}"
        assert expected in sentences
    assert len(sentences) == 4


def test_an_optimizer_that_is_not_loaded_is_one_incident_with_one_suspect(checkpoints, out):
    _, saved = checkpoints(Gpt)
    del saved["optimizer"]
    tensors = 3 * len(list(Gpt().parameters()))
    words = f"all {tensors} tensors of optimizer state that were saved at step {SECOND} are missing"
    assert told(resumed_run(out, Gpt, saved)) == [words]


def rotary(base):
    """Return what makes a model that computes its rotary frequencies itself, and saves none of them."""

    def make():
        model = Gpt()
        for name, start in (("inv_freq", base), ("original_inv_freq", base)):
            model.blocks.register_buffer(name, 1.0 / start ** (torch.arange(8) / 8), persistent=False)
        return model

    return make


def test_buffers_that_the_model_makes_itself_are_named(checkpoints, out):
    _, saved = checkpoints(rotary(10_000.0))
    words = f"is not what was saved at step {SECOND}"
    names = {f"buffer blocks.{name} {words}" for name in ("inv_freq", "original_inv_freq")}
    assert set(told(resumed_run(out, rotary(500_000.0), saved))) == names


def scaled(*scales, best=0.7):
    """Return what makes a model whose attentions have scales, and that has a number of its own."""

    def make():
        model = Gpt()
        for block, scale in zip(model.blocks, scales, strict=True):
            block.attn.scaling = scale
        model.best_loss = best
        return model

    return make


@pytest.mark.parametrize(
    ("was", "now", "words"),
    [
        ((0.25, 0.25), (0.5, 0.5), ["scaling of module blocks.0.attn (and 1 other) is 0.5, and was 0.25"]),
        ((0.25, 0.25), (0.25, 0.5), ["scaling of module blocks.1.attn is 0.5, and was 0.25"]),
        ((0.25, 0.25), (0.25, 0.25), []),
        ((0.25, 0.3), (0.5, 0.9), []),
    ],
)
def test_numbers_that_several_modules_of_a_users_class_share_are_compared(checkpoints, out, was, now, words):
    _, saved = checkpoints(scaled(*was))
    found = told(resumed_run(out, scaled(*now, best=9.0), saved))
    assert found == [f"{each} when step {SECOND} was saved" for each in words]


def test_numbers_that_the_run_has_changed_are_annealed(out):
    model, optimizer = parts(scaled(0.5, 0.5))
    with trainsentry.TrainMonitor({"output_dir": str(out / "first"), "strict": True}).watch(
        model, optimizer
    ) as monitor:
        train(model, optimizer, FIRST, monitor)
        for block in model.blocks:
            block.attn.scaling = 0.25
        train(model, optimizer, SECOND - FIRST, monitor)
        saved = checkpoint(model, optimizer, monitor)
    assert told(resumed_run(out / "second", scaled(0.125, 0.125), saved)) == []


def test_another_checkpoint_is_said_as_a_whole(checkpoints, out):
    _, saved = checkpoints(Gpt)
    for weight in saved["model"].values():
        weight.add_(1.0)
    size = len(list(Gpt().parameters()))
    words = f"none of the {size} parameters is what was saved at step {SECOND}"
    reason = "another checkpoint was loaded, or all were converted"
    assert told(resumed_run(out, Gpt, saved)) == [f"{words}: {reason}"]


def test_the_whole_older_checkpoint_is_said_as_such(checkpoints, out):
    older, saved = checkpoints(Gpt)
    saved["model"] = older["model"]
    size = len(list(Gpt().parameters()))
    words = (
        f"all {size} parameters are as they were in the older checkpoint of step {FIRST}, not as saved at step {SECOND}"
    )
    assert told(resumed_run(out, Gpt, saved)) == [words]


def test_weights_in_another_dtype_are_said_as_a_whole(checkpoints, out):
    _, saved = checkpoints(ResNet)
    model, optimizer = parts(lambda: ResNet().double(), seed=1)
    with trainsentry.TrainMonitor({"output_dir": str(out), "strict": True}).watch(model, optimizer) as monitor:
        monitor.load_state_dict(saved["monitor"])
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        model(torch.randn(2, 3, 8, 8).double()).sum().backward()
        optimizer.step()
        monitor.flush()
        sentences = told(monitor.incidents)
    size = len(list(ResNet().parameters()))
    assert f"all {size} parameters have dtype float64, and were saved as float32" in sentences


def test_a_new_head_alone_is_named(checkpoints, out):
    _, saved = checkpoints(ResNet)

    def with_head():
        model = ResNet()
        model.fc = nn.Linear(8, 20)
        return model

    del saved["model"]["fc.weight"], saved["model"]["fc.bias"]
    for place in (-1, -2):
        del saved["optimizer"]["state"][len(list(ResNet().parameters())) + place]
    sentences = told(resumed_run(out, with_head, saved))
    assert "parameter fc.weight has shape [20, 8], and was saved with [10, 8]" in sentences
    assert "parameter fc.bias has shape [20], and was saved with [10]" in sentences
    assert all(" fc." in sentence for sentence in sentences)


def test_buffers_that_are_not_loaded_are_named_although_the_first_pass_changes_them(checkpoints, out):
    _, saved = checkpoints(ResNet)
    for name in ("stem.1.running_mean", "stem.1.running_var"):
        del saved["model"][name]
    assert set(told(resumed_run(out, ResNet, saved))) == {
        f"buffer stem.1.running_mean is all zeros, which is not what was saved at step {SECOND}",
        f"buffer stem.1.running_var is not what was saved at step {SECOND}",
    }


def test_a_pass_before_the_weights_are_loaded_is_not_held_against_the_buffers(checkpoints, out):
    _, saved = checkpoints(ResNet)
    model, optimizer = parts(ResNet, seed=1)
    with trainsentry.TrainMonitor({"output_dir": str(out), "strict": True}).watch(model, optimizer) as monitor:
        monitor.load_state_dict(saved["monitor"])
        model(torch.randn(2, 3, 8, 8))
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        train(model, optimizer, 2, monitor)
        monitor.flush()
        assert monitor.incidents == ()
        assert not [hook for hook in model._forward_pre_hooks.values() if "fingerprints" in type(hook).__module__]


def test_a_compiled_model_resumes_in_one_graph_without_a_word(checkpoints, out):
    _, saved = checkpoints(ResNet)
    model, optimizer = parts(ResNet, seed=1)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with trainsentry.TrainMonitor({"output_dir": str(out), "strict": True}).watch(model, optimizer) as monitor:
        monitor.load_state_dict(saved["monitor"])
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        for _ in range(3):
            compiled(torch.randn(2, 3, 8, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        monitor.flush()
        assert monitor.incidents == ()


def test_the_fingerprints_of_a_resumed_run_go_on_from_those_of_the_first(checkpoints, out):
    _, saved = checkpoints(Gpt)
    model, optimizer = parts(Gpt, seed=1)
    with trainsentry.TrainMonitor({"output_dir": str(out), "strict": True}).watch(model, optimizer) as monitor:
        monitor.load_state_dict(saved["monitor"])
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        train(model, optimizer, 3, monitor)
        last = {
            "monitor": monitor.state_dict(),
            "model": copy.deepcopy(model.state_dict()),
            "optimizer": optimizer.state_dict(),
        }
    name = TWINS[Gpt][0]
    last["model"][name] = saved["model"][name]
    words = f"is as it was in the older checkpoint of step {SECOND}, not as saved at step {SECOND + 3}"
    assert told(resumed_run(out, Gpt, last)) == [f"parameter {name} {words}"]


def test_a_state_without_fingerprints_or_with_broken_ones_says_nothing(checkpoints, out):
    _, saved = checkpoints(ResNet)
    del saved["model"]["fc.weight"]
    broken = dict(saved["monitor"], fingerprints='{"version": 1}')
    earlier = {key: value for key, value in saved["monitor"].items() if key != "fingerprints"}
    for state in (broken, earlier):
        assert resumed_run(out, ResNet, {**saved, "monitor": state}) == ()


def test_the_state_is_small_and_training_is_unchanged_to_the_bit(checkpoints, out):
    _, saved = checkpoints(Gpt)
    tensors = 4 * len(list(Gpt().parameters()))
    assert len(saved["monitor"]["fingerprints"]) < 200 * tensors
    model, optimizer = parts(Gpt)
    train(model, optimizer, FIRST)
    train(model, optimizer, SECOND - FIRST)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, saved["model"][name]), name
