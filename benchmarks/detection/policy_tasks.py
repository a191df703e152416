"""Models that learn by their own actions, or towards targets that move with them."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from task import Task
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def q_learning() -> Task:
    """Return a value network whose targets come from its own slowly updated copy, so that they move as it learns."""
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    target = [p.detach().clone() for p in model.parameters()]
    names = [name for name, _ in model.named_parameters()]
    moves = torch.randn(3, 6, 6) * 0.3
    steps = [0]

    def loss() -> Tensor:
        state, action = torch.randn(64, 6), torch.randint(0, 3, (64,))
        after = torch.einsum("bij,bj->bi", moves[action], state).tanh()
        with torch.no_grad():
            best = torch.func.functional_call(model, dict(zip(names, target, strict=True)), (after,)).max(1).values
        return F.smooth_l1_loss(model(state).gather(1, action[:, None])[:, 0], after[:, 0] + 0.95 * best)

    def after() -> None:
        steps[0] += 1
        if steps[0] % 25 == 0:
            torch._foreach_copy_(target, [p.detach() for p in model.parameters()])

    return Task(model, loss, after=after)


def policy_gradient() -> Task:
    """Return a policy trained by REINFORCE on noisy rewards: its gradients are nearly noise, its loss has no trend."""
    model = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 4))
    best = torch.randn(5, 4)

    def loss() -> Tensor:
        state = torch.randn(32, 5)
        choice = torch.distributions.Categorical(logits=model(state))
        action = choice.sample()
        reward = (state @ best).gather(1, action[:, None])[:, 0] + torch.randn(32)
        advantage = (reward - reward.mean()) / reward.std()
        return -(choice.log_prob(action) * advantage).mean() - 0.01 * choice.entropy().mean()

    return Task(model, loss)


class ActorCritic(nn.Module):
    """A policy over two actions and a value, of the same observation."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        self.value = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, observed: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of the actions, and the value of each observation."""
        return self.policy(observed), self.value(observed)[:, 0]


class Poles:
    """Poles on a pivot, each to be held upright by pushes to the left or right; one that leans too far stands again."""

    def __init__(self, count: int) -> None:
        self.state = self.upright(count)

    @staticmethod
    def upright(count: int) -> Tensor:
        """Return angles and angular velocities near zero, shape (count, 2)."""
        return 0.1 * torch.randn(count, 2)

    def push(self, right: Tensor) -> Tensor:
        """Push each pole; return which have fallen and stand again."""
        angle, velocity = self.state.T
        velocity = velocity + 0.1 * (2 * angle.sin() + 2.0 * right - 1.0 + 0.3 * torch.randn(len(angle)))
        self.state = torch.stack((angle + 0.1 * velocity, velocity), dim=1)
        fallen = self.state[:, 0].abs() > 1.0
        self.state = torch.where(fallen[:, None], self.upright(len(fallen)), self.state)
        return fallen


def _rollout(model: ActorCritic, poles: Poles, steps: int) -> Batch:
    """Return observations, actions, log-probabilities, advantages and returns, each of shape (steps · poles, …)."""
    seen, actions, chances, values, fallen = [], [], [], [], []
    with torch.no_grad():
        for _ in range(steps):
            logits, value = model(poles.state)
            choice = torch.distributions.Categorical(logits=logits)
            action = choice.sample()
            for kept, new in ((seen, poles.state), (actions, action), (chances, choice.log_prob(action))):
                kept.append(new)
            values.append(value)
            fallen.append(poles.push(action.float()))
        following, advantage, advantages = model(poles.state)[1], torch.zeros(len(poles.state)), []
        for value, fell in zip(reversed(values), reversed(fallen), strict=True):
            goes_on = 1.0 - fell.float()
            advantage = goes_on - value + 0.99 * following * goes_on + 0.94 * goes_on * advantage
            advantages.append(advantage)
            following = value
    gains = torch.stack(advantages[::-1])
    return tuple(torch.cat(list(x)) for x in (seen, actions, chances, gains, gains + torch.stack(values)))  # type: ignore[return-value]


def actor_critic() -> Task:
    """Return a policy with a critic, by proximal updates: four of them use each rollout, in two halves, twice.

    What it observes changes as it learns to balance, and the batches of one rollout are alike.
    (Schulman et al., "Proximal Policy Optimization Algorithms", 2017.)
    """
    model, poles = ActorCritic(), Poles(16)

    def batches() -> Iterator[Batch]:
        while True:
            rollout = _rollout(model, poles, 32)
            for _ in range(2):
                for rows in torch.randperm(len(rollout[0])).chunk(2):
                    yield tuple(x[rows] for x in rollout)  # type: ignore[misc]

    updates = batches()

    def loss() -> Tensor:
        observed, action, before, gain, target = next(updates)
        logits, value = model(observed)
        choice = torch.distributions.Categorical(logits=logits)
        gain = (gain - gain.mean()) / (gain.std() + 1e-6)
        ratio = (choice.log_prob(action) - before).exp()
        of_policy = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        return of_policy + 0.01 * F.mse_loss(value, target) - 0.01 * choice.entropy().mean()

    return Task(model, loss, clip=0.5)
