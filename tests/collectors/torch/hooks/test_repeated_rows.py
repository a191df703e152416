"""Copies among the samples of a batch are counted where activations are sampled, and change nothing."""

import pytest
import torch
from tiny_models import mlp

import trainsentry
from trainsentry.collectors.torch.hooks.repeated_rows import share_of_repeated


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("shape", [(24, 16), (24, 3, 8, 8), (8, 200)])
def test_the_share_of_copies_is_counted(dtype, shape):
    batch = torch.randint(0, 2 if dtype == torch.bool else 200, shape, generator=torch.Generator().manual_seed(0))
    batch = batch.to(dtype)
    assert share_of_repeated([batch]).item() == 0
    half = len(batch) // 2
    assert share_of_repeated([torch.cat([batch[:half], batch[:half]])]).item() == 0.5
    batch[3] = batch[1]
    assert share_of_repeated([batch]).item() == pytest.approx(1 / len(batch))


SMALL = [torch.ones(3, 100), torch.ones(64, 4), torch.tensor(1.0), torch.ones(9, 0), torch.ones(64)]
OTHERS = [torch.ones(16, 32).to_sparse(), torch.ones(16, 32, dtype=torch.complex64)]
OTHERS += [torch.nested.nested_tensor([torch.ones(20)] * 9, layout=layout) for layout in (torch.strided, torch.jagged)]


@pytest.mark.parametrize("batch", [*SMALL, *OTHERS])
def test_small_batches_and_other_layouts_say_nothing(batch):
    assert share_of_repeated([batch]) is None


@pytest.mark.parametrize(("copies", "share"), [(4, 0.75), (3, 0.5), (2, 0.0)])
def test_of_a_few_samples_half_must_be_copies(copies, share):
    """One of four that comes twice is drawn with replacement."""
    batch = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    batch[:copies] = batch[0].clone()
    assert share_of_repeated([batch]).item() == share


def test_samples_are_copies_where_they_are_in_each_input():
    tokens, mask = torch.arange(16)[:, None] * torch.arange(1, 33), torch.ones(16, 32, dtype=torch.int64)
    assert share_of_repeated([tokens, mask, torch.ones(3, 5)]).item() == 0
    assert share_of_repeated([torch.cat([tokens[:8]] * 2), mask]).item() == 0.5


def test_what_all_samples_have_in_common_makes_none_a_copy():
    draw = torch.Generator().manual_seed(0)
    assert share_of_repeated([101325 + 5 * torch.randn(64, 256, generator=draw)]).item() == 0
    images = torch.zeros(64, 3, 224, 224)
    images[:, :, 100:, 100:] = torch.randn(64, 3, 124, 124, generator=draw)
    assert share_of_repeated([images]).item() == 0


def test_a_large_input_is_not_copied(monkeypatch):
    """A mask for all heads takes the memory of one."""
    sizes, cat = [], torch.cat
    monkeypatch.setattr(torch, "cat", lambda parts, dim: sizes.extend(x.numel() for x in parts) or cat(parts, dim=dim))
    share_of_repeated([torch.zeros(8, 1, 2048, 2048).expand(8, 16, 2048, 2048), torch.zeros(8, 3, 999, 7)])
    assert max(sizes) <= 2**18


def test_what_is_not_finite_is_no_copy():
    assert share_of_repeated([torch.full((8, 16), float("nan"))]).item() == 0


def test_a_batch_whose_second_half_repeats_the_first_is_told_by_default(tmp_path):
    torch.manual_seed(0)
    model = mlp(16)
    optimizer = torch.optim.AdamW(model.parameters())
    with trainsentry.TrainMonitor({"output_dir": str(tmp_path), "on_incident": {"dump": False}}).watch(
        model, optimizer
    ) as monitor:
        for step in range(92):
            x = torch.randn(32, 16)
            x = torch.cat([x[:16], x[:16]]) if step >= 70 else x
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        monitor.flush()
        [incident] = monitor.incidents
    assert (incident.kind, incident.first_seen, incident.name) == ("duplicate_data", 70, "input.0")
    assert "0.5 of the samples in a batch of input.0 (data) are copies of others from step 70 on" in incident.summary


def test_inputs_that_have_no_values_yet_are_passed_by(tmp_path, caplog):
    """Inside a transform (vmap, grad) an input is a batch of inputs, whose numbers cannot be read."""
    model = mlp(16)
    optimizer = torch.optim.AdamW(model.parameters())
    with trainsentry.TrainMonitor({"output_dir": str(tmp_path), "strict": True}).watch(model, optimizer):
        for _ in range(2):
            weights = {name: p.detach() for name, p in model.named_parameters()}

            def loss(weights, x):
                return torch.func.functional_call(model, weights, (x.expand(9, 16),)).square().mean()

            torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, torch.randn(8, 16))
            model(torch.randn(32, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert "Traceback" not in caplog.text
