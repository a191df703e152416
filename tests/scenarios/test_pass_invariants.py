"""What a step's passes, gradients and updates owe to each other is checked in real trainings: a breach is named."""

import pytest
import torch
from two_families import CONFIGURATIONS, FAMILIES, FAULT, train

both_families = pytest.mark.parametrize("family", FAMILIES)
both_configurations = pytest.mark.parametrize("collect", CONFIGURATIONS)
everything = pytest.mark.parametrize("collect", ["everything"])

MODULE = {"gpt": "blocks.1.linear1", "resnet": "body.0"}

SAMPLED = -(-FAULT // 10) * 10
"""The first step after the fault in which activations and weights are sampled by default."""


def first_step(collect):
    return FAULT if collect == "everything" else SAMPLED


@both_configurations
@pytest.mark.parametrize(("family", "clip"), [("gpt", None), ("gpt", 0.5), ("resnet", None)])
def test_a_gradient_that_is_doubled_after_the_backward_pass_is_named(tmp_path, family, collect, clip):
    name = {"gpt": "blocks.1.linear1.bias", "resnet": "body.1.bias"}[family]

    def double(model, stepper, step):
        model.get_parameter(name).grad.mul_(2.0 if step >= FAULT else 1.0)

    [found, *_] = train(tmp_path, family, collect=collect, harm=double, clip=clip, steps=SAMPLED + 4)
    assert (found.name, found.quantity, found.step) == (name, "gradient", first_step(collect))
    assert "adds up to" in found.summary


@both_families
@both_configurations
def test_a_second_update_with_the_same_gradients_is_named(tmp_path, family, collect):
    def again(model, stepper, step):
        if step >= FAULT:
            stepper.step()

    [found, *_] = train(tmp_path, family, collect=collect, harm=again, steps=FAULT + 4)
    assert (found.name, found.kind) == ("all", "stale")
    assert "used the gradients of the update before it again" in found.summary


@both_families
@everything
def test_a_weight_that_something_disturbs_at_every_step_is_named(tmp_path, family, collect):
    name = FAMILIES[family][3]

    def disturb(model, stepper, step):
        if step >= FAULT:
            weight = model.get_parameter(name).data
            weight.add_(torch.randn_like(weight), alpha=0.03 * float(weight.square().mean().sqrt()))

    found = train(tmp_path, family, collect=collect, harm=disturb, steps=FAULT + 16)
    assert (name, "parameter", FAULT) in [(i.name, i.quantity, i.step) for i in found]


@both_families
@both_configurations
def test_a_weight_whose_updates_are_lost_is_named(tmp_path, family, collect):
    name, kept = f"{MODULE[family]}.weight", {}

    def put_back(model, stepper, step):
        if step >= FAULT:
            weight = model.get_parameter(name).data
            weight.copy_(kept.setdefault("weight", weight.clone()))

    found = train(tmp_path, family, collect=collect, harm=put_back, steps=SAMPLED + 14)
    told = {i.name: i for i in found if "its updates are lost" in i.summary}
    assert [told[name].kind] == ["frozen"]
    assert told[name].first_seen <= SAMPLED + 10


@both_families
@pytest.mark.parametrize(("optimizer", "state"), [("nesterov", "momentum_buffer"), ("dampened", "momentum_buffer")])
def test_momentum_that_is_lost_between_two_samples_is_named_with_its_step(tmp_path, family, optimizer, state):
    def lose(model, stepper, step):
        if step == FAULT:
            for kept in stepper.state.values():
                kept[state].zero_()

    [found, *_] = train(tmp_path, family, optimizer, harm=lose, steps=SAMPLED + 2)
    assert (found.kind, found.quantity, found.step) == ("state_reset", state, FAULT)


@both_families
def test_a_checkpoint_that_is_loaded_again_has_lost_no_state(tmp_path, family):
    kept = {}

    def load(model, stepper, step):
        if step == FAULT - 30:
            kept["model"] = {name: x.clone() for name, x in model.state_dict().items()}
            kept["momentum"] = [state["momentum_buffer"].clone() for state in stepper.state.values()]
        if step == FAULT:
            model.load_state_dict(kept["model"])
            for state, momentum in zip(stepper.state.values(), kept["momentum"], strict=True):
                state["momentum_buffer"].copy_(momentum)

    found = train(tmp_path, family, "nesterov", harm=load, steps=SAMPLED + 2)
    assert "state_reset" not in {i.kind for i in found}


@both_families
@everything
def test_other_weights_that_are_swapped_in_and_not_back_are_the_first_suspect(tmp_path, family, collect):
    def swap(model, stepper, step):
        if step == FAULT:
            for parameter in model.parameters():
                parameter.data.mul_(-1.5)

    [found, *_] = train(tmp_path, family, collect=collect, harm=swap, steps=FAULT + 8)
    assert (found.name, found.quantity) == ("all", "parameter")
    assert f"most parameters were modified outside the optimizer update before step {FAULT}" in found.summary


@both_families
@everything
def test_states_that_were_given_to_other_parameters_are_named(tmp_path, family, collect):
    """As from a checkpoint that names them by number, in another order."""

    def rotate(model, stepper, step):
        by_shape = {}
        for state in stepper.state.values():
            by_shape.setdefault(state["exp_avg_sq"].shape, []).append(state)
        for states in by_shape.values() if step == FAULT else ():
            for name in ("exp_avg", "exp_avg_sq"):
                moved = [state[name] for state in states]
                for state, other in zip(states, [*moved[1:], moved[0]], strict=True):
                    state[name] = other

    [found, *_] = train(tmp_path, family, collect=collect, harm=rotate, steps=SAMPLED + 2)
    assert found.quantity in {"exp_avg", "exp_avg_sq"}
    assert FAULT <= found.step <= FAULT + 1


@both_families
@both_configurations
def test_a_gradient_that_is_zero_although_its_module_got_one_is_named(tmp_path, family, collect):
    name = f"{MODULE[family]}.weight"

    def drop(model, stepper, step):
        if step >= FAULT:
            model.get_parameter(name).grad.zero_()

    [found, *_] = train(tmp_path, family, collect=collect, harm=drop, steps=SAMPLED + 4)
    assert (found.name, found.quantity) == (name, "gradient")
    assert found.first_seen <= FAULT + 1


def test_a_gradient_that_grows_by_some_percent_a_step_is_named(tmp_path):
    """The common factor of all gradients is not known in a model of two weights, as the small ResNet is."""
    name = f"{MODULE['gpt']}.weight"

    def grow(model, stepper, step):
        model.get_parameter(name).grad.mul_(1.1 ** max(step - FAULT, 0))

    [found, *_] = train(tmp_path, "gpt", "nesterov", "everything", grow)
    assert (found.name, found.quantity) == (name, "gradient")
    assert FAULT <= found.step <= FAULT + 22


@both_configurations
def test_images_that_fade_are_named(tmp_path, collect):
    def fade(step, given):
        return given[0] * 0.95 ** max(step - FAULT, 0), given[1]

    [found, *_] = train(tmp_path, "resnet", collect=collect, batch=fade)
    assert (found.name, found.quantity) == ("input.0", "data")
    assert FAULT <= found.step <= FAULT + 16


@both_configurations
def test_a_batch_whose_second_half_repeats_the_first_is_named(tmp_path, collect):
    def halved(step, given):
        return tuple(torch.cat([x[:8], x[:8]]) for x in given) if step >= FAULT else given

    [found, *_] = train(tmp_path, "resnet", collect=collect, batch=halved, steps=SAMPLED + 14)
    assert (found.name, found.quantity, found.step) == ("input.0", "data", first_step(collect))


@both_families
@both_configurations
def test_a_channel_that_is_zero_is_named(tmp_path, family, collect):
    def silence(model, stepper, step):
        module = model.get_submodule(MODULE[family])
        if step == FAULT - 1:
            forward = module.forward
            module.forward = lambda x: forward(x).index_fill(-1 if family == "gpt" else 1, torch.tensor([2, 3]), 0.0)

    [found, *_] = train(tmp_path, family, collect=collect, harm=silence, steps=SAMPLED + 24)
    assert found.step in {FAULT, SAMPLED}  # the zeros of a weight's gradient are read at every step
    assert found.name.startswith(MODULE[family])
