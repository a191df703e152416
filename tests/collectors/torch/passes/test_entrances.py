"""Where a training calls parts of a model and not the model, what enters these parts is its data, at every step."""

import pytest
import torch
from torch import nn

import trainsentry
from trainsentry.collectors.series import PASSES_WITHOUT_GRADIENTS

STEPS, EVERY = 24, 10


class Policy(nn.Module):
    """Acts by a call of the model, and is trained through methods of its own, as policies are."""

    def __init__(self):
        super().__init__()
        self.features, self.actor, self.critic = nn.Flatten(), nn.Linear(4, 2), nn.Linear(4, 1)
        self.own_parts = False

    def forward(self, observation):
        return self.actor(self.features(observation)).argmax(-1)

    def evaluate(self, observation):
        """Return what the loss needs; with `own_parts`, nothing is made of the observation first."""
        known = observation if self.own_parts else self.features(observation)
        return self.actor(known), self.critic(known)


def observed(step, rows=8):
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(step))


def train(tmp_path, forward, *, policy=None, acts=0):
    """Train a policy by the losses of `forward(policy, observation)`; return the records."""
    torch.manual_seed(0)
    policy = policy or Policy()
    sgd = torch.optim.SGD(policy.parameters(), lr=0.1)
    config = {"output_dir": str(tmp_path), "strict": True, "collect": {"activations": {"every": EVERY}}}
    with trainsentry.TrainMonitor(config).watch(policy, sgd) as monitor:
        for step in range(STEPS):
            with torch.no_grad():
                for act in range(acts if step % 8 == 0 else 0):
                    policy(observed(act))
            sum(part.square().mean() for part in forward(policy, observed(step))).backward()
            sgd.step()
            sgd.zero_grad()
        return monitor.records()


def data(table):
    """Return the steps of each of the model's inputs, by its name."""
    inputs = table[(table["quantity"] == "activation_input") & table["name"].str.startswith("input.")]
    return {name: list(rows["step"]) for name, rows in inputs.groupby("name")}


def test_the_first_part_that_is_called_gets_the_data_at_every_step_from_the_second_on(tmp_path):
    table = train(tmp_path, Policy.evaluate, acts=5)
    assert data(table) == {"input.features.0": list(range(1, STEPS))}
    norms = table[table["name"] == "input.features.0"]["norm"]
    assert list(norms) == pytest.approx([float(observed(step).norm()) for step in range(1, STEPS)])
    assert set(table[table["quantity"] == "activation_output"]["step"]) == {0, 10, 20}


def test_two_parts_that_get_the_data_have_a_name_each(tmp_path):
    policy = Policy()
    policy.own_parts = True
    assert set(data(train(tmp_path, Policy.evaluate, policy=policy))) == {"input.actor.0", "input.critic.0"}


def test_a_model_that_is_called_itself_has_no_other_entrance(tmp_path):
    class Called(Policy):
        def forward(self, observation):
            return self.actor(self.features(observation))

    def loss(policy, observation):
        return policy.critic(observation), policy(observation)  # the critic is called ahead of the model

    assert data(train(tmp_path, loss, policy=Called())) == {"input.0": list(range(STEPS))}


def test_a_part_that_is_also_called_inside_another_is_no_entrance(tmp_path):
    class Shared(Policy):
        def __init__(self):
            super().__init__()
            self.both = nn.Sequential(self.features, nn.Linear(4, 2))

    def loss(policy, observation):
        return policy.critic(policy.features(observation)), policy.both(observation + 1)

    assert set(data(train(tmp_path, loss, policy=Shared()))) == {"input.both.0"}


def test_a_discriminator_that_also_gets_what_a_generator_makes_has_no_data(tmp_path):
    class Adversaries(Policy):
        def __init__(self):
            super().__init__()
            self.generator = nn.Linear(4, 4)

    def loss(nets, observation):
        made = nets.generator(torch.ones(8, 4))
        return nets.critic(observation), nets.critic(made.detach() + 0.0), nets.critic(made)

    assert set(data(train(tmp_path, loss, policy=Adversaries()))) == {"input.generator.0"}


def test_what_a_model_learns_to_give_its_parts_is_no_data(tmp_path):
    class Prompted(Policy):
        def __init__(self):
            super().__init__()
            self.prompt = nn.Parameter(torch.zeros(8, 4))

    assert data(train(tmp_path, lambda p, x: p.evaluate(x + p.prompt), policy=Prompted())) == {}


@pytest.mark.parametrize("acts", [0, 5])
def test_passes_without_gradients_are_counted_once_however_many_modules_see_them(tmp_path, acts):
    table = train(tmp_path, Policy.evaluate, acts=acts)
    counted = table[table["name"] == PASSES_WITHOUT_GRADIENTS]
    found = dict(zip(counted["step"], counted["value"], strict=True))
    assert found == ({1: 5.0, 8: 5.0, 16: 5.0} if acts else {})


def test_a_teacher_that_runs_without_gradients_at_each_step_makes_no_phases(tmp_path):
    """Steps that sample activations see its calls, and the others do not."""

    class Distilled(Policy):
        def __init__(self):
            super().__init__()
            self.teacher = nn.Linear(4, 2)

    def loss(nets, observation):
        with torch.no_grad():
            aim = nets.teacher(observation)
        return (nets.actor(observation) - aim,)

    table = train(tmp_path, loss, policy=Distilled())
    assert set(table[table["name"] == PASSES_WITHOUT_GRADIENTS]["step"]) <= {1}


def test_the_training_is_the_same_to_the_bit(tmp_path):
    def weights(watched):
        policy = Policy()
        torch.manual_seed(1)
        for parameter in policy.parameters():
            nn.init.normal_(parameter)
        if watched:
            train(tmp_path, Policy.evaluate, policy=policy, acts=3)
        else:
            sgd = torch.optim.SGD(policy.parameters(), lr=0.1)
            for step in range(STEPS):
                sum(part.square().mean() for part in policy.evaluate(observed(step))).backward()
                sgd.step()
                sgd.zero_grad()
        return list(policy.parameters())

    assert all(torch.equal(a, b) for a, b in zip(weights(watched=True), weights(watched=False), strict=True))
