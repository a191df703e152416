"""A parameter with a gradient that no optimizer holds is told of where it cannot be meant, and nowhere else."""

import pytest
import torch
from torch import nn
from weight_loop import told_by

import trainsentry
from trainsentry.collectors.series import REPLACED, UNHELD, UNHELD_UPDATES, SeriesTable
from trainsentry.collectors.torch.parameters import unheld, weight_writes
from trainsentry.collectors.torch.parameters.unheld import UnheldParameters
from trainsentry.collectors.torch.parameters.weight_writes import WRITTEN_BEFORE, WeightWrites
from trainsentry.collectors.torch.rows.step_rows import StepRows
from trainsentry.collectors.torch.sharding.model_names import ModelNames

BEFORE = WRITTEN_BEFORE + 2


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch):
    """Other tests of this process compile."""
    for module in (weight_writes, unheld):
        monkeypatch.setattr(module, "has_compiled", lambda: False)


class Net(nn.Module):
    """A table, blocks and a head."""

    def __init__(self, blocks=2):
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(blocks))
        self.head = nn.Linear(4, 8, bias=False)

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


class Loop:
    """A training loop that is looked at as `TorchWatch` does it."""

    def __init__(self, change=lambda _: None, optimized=nn.Module.parameters):
        torch.manual_seed(0)
        self.model = Net()
        self.optimizers = [torch.optim.SGD(optimized(self.model), lr=0.1)]
        change(self.model)
        self.table, self.names = SeriesTable(), ModelNames()
        self.names.add([self.model], self.optimizers)
        self.rows = StepRows(self.table, 0.0)
        self.warnings = []
        self.unheld = UnheldParameters(self.rows, self.names, lambda _, text: self.warnings.append(text))
        self.writes = WeightWrites(self.rows, self.model.parameters, self.unheld.note_left)
        self.owned = None

    def notice_additions(self):
        """Take the model's names anew, as it is done where something was added."""
        names = ModelNames()
        names.add([self.model], self.optimizers)
        self.names.modules, self.names.parameters = names.modules, names.parameters

    def step(self, after_backward=lambda _: None):
        self.model(torch.randint(0, 8, (6,))).logsumexp(1).sum().backward()
        after_backward(self.model)
        held = {id(p) for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]}
        if self.owned is None:
            self.owned = [n for n in self.names.parameters if id(n.parameter) in held]
        for optimizer in self.optimizers:
            self.unheld.note(optimizer, self.optimizers)
        self.writes.begin(self.optimizers[0], self.owned)
        for optimizer in self.optimizers:
            optimizer.step()
        self.writes.updated(self.optimizers[0])
        self.model.zero_grad()
        return told_by(self.rows)

    def steps(self, count, **changes):
        return [told for _ in range(count) if (told := self.step(**changes))]


def other_head(model):
    model.head = nn.Linear(4, 8, bias=False)


def test_a_head_that_was_replaced_before_the_training_is_told_of_once():
    loop = Loop(other_head)
    assert loop.steps(UNHELD_UPDATES - 1) == []
    assert loop.step() == {"unwritten.head.weight": UNHELD}
    assert loop.steps(50) == []


def adapted(model):
    """Freeze the model but for new weights beside its own, as adapters are."""
    model.requires_grad_(False)
    model.blocks.append(nn.Linear(4, 4))


def test_adapters_that_came_after_the_optimizer_was_made_are_told_of():
    [told] = Loop(adapted).steps(50)
    assert told == {"unwritten.blocks.2.weight": UNHELD, "unwritten.blocks.2.bias": UNHELD}


def test_a_backbone_outside_the_optimizer_is_meant():
    loop = Loop(optimized=lambda model: model.head.parameters())
    assert loop.steps(50) == []
    [warning] = loop.warnings
    assert warning.startswith(
        "no optimizer holds table.weight, blocks.0.weight, blocks.0.bias, blocks.1.weight, … (5 in"
    )


def test_a_parameter_without_a_gradient_is_not_told_of():
    loop = Loop(other_head)
    assert loop.steps(50, after_backward=lambda model: setattr(model.head.weight, "grad", None)) == []


def write_by_hand(model):
    with torch.no_grad():
        model.head.weight -= 0.1 * model.head.weight.grad


def test_a_parameter_that_the_loop_updates_itself_is_not_told_of():
    assert Loop(other_head).steps(50, after_backward=write_by_hand) == []


def test_an_optimizer_that_nobody_watches_holds_its_parameters():
    loop = Loop(other_head)
    other = torch.optim.Adam(loop.model.head.parameters(), fused=True)  # whose updates torch counts no writes of
    assert loop.steps(50) == []
    assert loop.warnings == []
    loop.model.blocks.append(nn.Linear(4, 4))
    other.add_param_group({"params": list(loop.model.blocks[-1].parameters())})
    loop.notice_additions()
    assert loop.steps(50) == []


def test_updates_of_two_optimizers_in_a_step_count_once():
    loop = Loop(other_head, optimized=lambda model: [*model.table.parameters(), *model.head.parameters()])
    loop.optimizers.append(torch.optim.SGD(loop.model.blocks.parameters(), lr=0.1))
    assert loop.steps(UNHELD_UPDATES - 1) == []
    assert loop.step() == {"unwritten.head.weight": UNHELD}


def test_an_optimizer_that_comes_late_holds_its_parameters():
    loop = Loop(other_head)
    assert loop.steps(UNHELD_UPDATES - 1) == []
    loop.optimizers.append(torch.optim.Adam(loop.model.head.parameters()))
    assert loop.steps(50) == []


@pytest.mark.parametrize("is_held", [False, True])
def test_a_block_that_was_added_is_told_of_where_no_optimizer_receives_it(is_held):
    loop = Loop()
    assert loop.steps(BEFORE) == []
    loop.model.blocks.append(nn.Linear(4, 4))
    if is_held:
        loop.optimizers[0].add_param_group({"params": list(loop.model.blocks[-1].parameters())})
    loop.notice_additions()
    both = {"unwritten.blocks.2.weight": UNHELD, "unwritten.blocks.2.bias": UNHELD}
    assert loop.steps(50) == ([] if is_held else [both])


def test_a_head_that_was_replaced_in_the_training_is_told_of_at_its_first_update():
    loop = Loop()
    assert loop.steps(BEFORE) == []
    other_head(loop.model)
    assert loop.step() == {"unwritten.head.weight": REPLACED}
    assert loop.steps(50) == []


def test_a_head_that_has_an_optimizer_of_its_own_from_its_first_step_on_is_held():
    loop = Loop()
    assert loop.steps(BEFORE) == []
    other_head(loop.model)
    loop.optimizers.append(torch.optim.SGD(loop.model.head.parameters(), lr=0.1))
    assert loop.steps(50) == []


def test_a_block_that_was_removed_rests():
    loop = Loop()
    assert loop.steps(BEFORE) == []
    del loop.model.blocks[1]
    assert loop.steps(80) == []


def test_the_models_parameters_are_looked_through_seldom_however_often_experts_rest():
    loop, looks = Loop(), []
    original = loop.model.parameters
    loop.model.parameters = lambda: looks.append(1) or original()
    for _ in range(unheld.LOOK_EVERY - 1):
        loop.unheld.note_left(loop.names.parameters[:1])
        loop.unheld.note(loop.optimizers[0], loop.optimizers)
    assert len(looks) == 1


def test_a_tie_that_is_cut_is_noticed_at_once_though_no_module_is_new(out):
    torch.manual_seed(0)
    model = Net(blocks=8)
    model.head.weight = model.table.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"output_dir": str(out), "collect": {"gradients": {"every": 1}}}
    with trainsentry.TrainMonitor(settings).watch(model, optimizer) as monitor:
        for step in range(60):
            if step == 35:
                model.head.weight = nn.Parameter(model.head.weight.detach().clone())
            model(torch.randint(0, 8, (6,))).logsumexp(1).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    scalars = monitor.records().query("quantity == 'unwritten.head.weight'")
    assert scalars[["step", "value"]].to_numpy().tolist() == [[35 + UNHELD_UPDATES, UNHELD]]


def test_a_replaced_head_is_told_where_the_optimizer_computes_the_gradients(out):
    """As Lightning's automatic optimization has it."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.randint(0, 8, (6,))).logsumexp(1).sum()
        loss.backward()
        return loss

    with trainsentry.TrainMonitor({"output_dir": str(out)}).watch(model, optimizer) as monitor:
        for step in range(60):
            if step == 35:
                other_head(model)
            optimizer.step(closure)
    scalars = monitor.records().query("quantity == 'unwritten.head.weight'")
    assert scalars[["step", "value"]].to_numpy().tolist() == [[35, REPLACED]]


@pytest.mark.parametrize("is_held", [False, True])
def test_a_layer_that_is_thawed_and_given_to_no_optimizer_is_told_of(is_held):
    loop = Loop(
        change=lambda m: m.blocks.requires_grad_(requires_grad=False),
        optimized=lambda m: [*m.table.parameters(), *m.head.parameters(), *(m.blocks.parameters() if is_held else ())],
    )
    assert loop.steps(BEFORE) == []
    loop.model.blocks[1].requires_grad_(requires_grad=True)
    told = loop.steps(3 * UNHELD_UPDATES)
    names = {name for each in told for name in each}
    assert names == (set() if is_held else {"unwritten.blocks.1.weight", "unwritten.blocks.1.bias"})
    assert loop.warnings == []
