"""A gradient that comes to an output which never had one is told; thawed layers, tasks and late losses are not."""

import pytest
import torch
from step_records import Records
from torch import nn
from torch.nn.functional import cosine_similarity

import trainsentry
from trainsentry.anomaly.rules.gradients.new_gradient import NONE_BEFORE, NewGradientRule

FEATURES, ANSWER, OTHER = "output.0", "output.1", "head.output.0"
AT = 40


def run(alone, gradients, outputs=(FEATURES, ANSWER, OTHER), samples=80, more=lambda sample: {}):
    """Return what is found; `gradients(sample)` names the outputs with a gradient in each tenth step."""
    records, found = Records(), []
    judge = alone(NewGradientRule, records.table)
    for sample in range(samples):
        rows = {(name, "activation_output"): 1.0 for name in outputs} | {("w", "gradient"): 1.0}
        rows |= {(name, "activation_grad_output"): norm for name, norm in gradients(sample).items()}
        found += judge(records.step(10 * sample, rows | more(sample)))
    return [(records.table.series[f.series_id].name, f.step, f.last_clean) for f in found]


def late(begins, norm=1.0):
    return lambda s: {ANSWER: 1.0, OTHER: 1.0} | ({FEATURES: norm} if begins(s) else {})


def test_an_output_that_gets_its_first_gradient_is_told_once_by_its_first_step(alone):
    assert run(alone, late(lambda s: s >= AT)) == [(FEATURES, 10 * AT, 10 * AT - 10)]


def test_gradients_that_were_all_zero_are_none(alone):
    found = run(alone, lambda s: {ANSWER: 1.0, FEATURES: float(s >= AT)})
    assert found == [(FEATURES, 10 * AT, 10 * AT - 10)]


@pytest.mark.parametrize(
    "gradients",
    [
        late(lambda s: True),
        late(lambda s: False),
        late(lambda s: s >= NONE_BEFORE - 1),  # as the training begins
        late(lambda s: s % 20 == 19),  # a loss that comes now and then
        late(lambda s: s < 3 or s >= AT),  # it had one
        late(lambda s: s >= AT, norm=0.0),
        lambda s: {FEATURES: 1.0, ANSWER: 1.0} if s >= AT else {OTHER: 1.0},  # the module had none at all
    ],
)
def test_what_had_one_comes_seldom_or_comes_with_the_whole_module_is_nothing(alone, gradients):
    assert run(alone, gradients) == []


@pytest.mark.parametrize(
    "more",
    [
        lambda s: {("thawed", "gradient"): 1.0} if s >= AT else {},
        lambda s: {("stage", "stage"): float(s >= AT)},
    ],
    ids=["a layer is thawed", "a stage is declared"],
)
def test_what_brings_parameters_their_first_gradient_or_is_declared_is_meant(alone, more):
    assert run(alone, late(lambda s: s >= AT), more=more) == []


def test_layers_that_are_thawed_one_after_the_other_are_meant(alone):
    """The gradient of the second one comes while that of the first is followed."""
    more = lambda s: {("first", "gradient"): 1.0, **({("next", "gradient"): 1.0} if s > AT else {})} if s >= AT else {}  # noqa: E731
    assert run(alone, late(lambda s: s >= AT), more=more) == []


class TwoViews(nn.Module):
    """The projections that must not learn from the other view's predictions, and these (Chen and He, 2021)."""

    def __init__(self, width=16):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(width, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
        self.predictor = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        self.stops = True

    def forward(self, x):
        z = self.encoder(x)
        return (z.detach() if self.stops else z + 0.0), self.predictor(z)


@pytest.mark.parametrize("lost", [True, False])
def test_a_stop_gradient_that_is_lost(tmp_path, lost):
    torch.manual_seed(0)
    model = TwoViews()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {"output_dir": str(tmp_path), "collect": {"activations": {"every": 2}}}
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        for step in range(90):
            model.stops = not lost or step < 60
            x = torch.randn(64, 16)
            (a, p), (b, q) = model(x + 0.1 * torch.randn_like(x)), model(x + 0.1 * torch.randn_like(x))
            loss = -(cosine_similarity(p, b).mean() + cosine_similarity(q, a).mean()) / 2
            optimizer.zero_grad()
            loss.backward()
            monitor.log(loss=loss.detach())
            optimizer.step()
    told = [i.name for i in monitor.incidents]
    assert told == (["output.0"] if lost else [])
