"""Weights whose values other tensors hold, as torchao's of eight bits, are passed by; all others are read."""

import pytest
import torch
from debugged import read
from torch import nn

import trainsentry
from trainsentry import PrecisionDebugger

quantization = pytest.importorskip("torchao.quantization")


class Adapted(nn.Module):
    """A frozen layer of eight bits beside an adapter, as QLoRA has it (Dettmers et al., NeurIPS 2023)."""

    def __init__(self, frozen, rank=4):
        super().__init__()
        self.frozen = frozen
        self.down = nn.Parameter(0.1 * torch.randn(rank, frozen.in_features))
        self.up = nn.Parameter(torch.zeros(frozen.out_features, rank))

    def forward(self, x):
        return self.frozen(x) + 2.0 * (x @ self.down.T) @ self.up.T


def adapted():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).requires_grad_(requires_grad=False)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    model[0], model[2] = Adapted(model[0]), Adapted(model[2])
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def train(model, optimizer, steps, begin=lambda: None, end=lambda loss: None):
    losses = []
    for _ in range(steps):
        begin()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(16, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        end(loss.detach())
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("task", ["statistics", "tensor", "structure", "overflow_check"])
@pytest.mark.parametrize("level", ["L0", "mix"])
def test_a_dump_names_such_a_weight_and_has_the_numbers_of_all_others(tmp_path, task, level, capfd):
    bare = train(*adapted(), 2)
    debugger = PrecisionDebugger(task=task, level=level, dump_path=str(tmp_path))
    model, optimizer = adapted()

    def end(_):
        debugger.stop()
        debugger.step()

    assert train(model, optimizer, 2, lambda: debugger.start(model), end) == bare
    assert "failed" not in capfd.readouterr().err
    if task in {"statistics", "tensor"} and level == "mix":
        data = read(tmp_path / "step0" / "rank0")["dump"]["data"]
        weight = data["Functional.linear.0.forward"]["input_args"][1]
        assert (weight["shape"], weight["Max"]) == ([32, 16], None)
        assert data["Functional.linear.0.forward"]["output"][0]["Max"] > 0


def test_a_training_with_such_weights_is_watched_without_a_word(tmp_path, capfd):
    bare = train(*adapted(), 100)
    model, optimizer = adapted()
    every = {part: {"every": 1} for part in ("parameters", "activations", "updates", "optimizer_state")}
    with trainsentry.TrainMonitor({"output_dir": str(tmp_path), "collect": every}).watch(model, optimizer) as monitor:
        assert train(model, optimizer, 100, end=lambda loss: monitor.log(loss=loss)) == bare
    assert not monitor.incidents
    said = capfd.readouterr().err
    assert "skipped" not in said
    assert "100 steps watched, 0 incidents" in said
