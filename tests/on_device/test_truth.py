"""What is recorded on the device is what float64 says of the same tensors."""

import math

import pytest
import torch
import torch.nn.functional as F
from device_training import EVERYTHING, adamw, batch, config_of, new_model
from the_device import DEVICE, HAS_FLOAT64, RELATIVE
from torch import nn

import trainsentry
from trainsentry.collectors.statistics import STATISTICS, reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 2, 31, 1023, 1024, 1025, 16_384 + 1, 9 * 8192 + 5)


def assert_row(row, tensor):
    """A row holds the tensor's statistics as float64 gives them."""
    want = reference(tensor.detach().double().cpu().numpy())
    size = max(tensor.numel(), 1)
    for name in STATISTICS:
        # No two numbers of float32 are so close to each other as float64 demands here.
        expected = want[name] if HAS_FLOAT64 else float(torch.tensor(want[name], dtype=torch.float64).float())
        bound = (0.0 if HAS_FLOAT64 else 1e-44) + (RELATIVE * want["norm"] / math.sqrt(size) if name == "mean" else 0.0)
        assert row[name] == pytest.approx(expected, rel=RELATIVE, abs=bound, nan_ok=True), name


def test_gradients_weights_and_state_of_a_training(out):
    model = new_model()
    optimizer = adamw(model)
    with trainsentry.TrainMonitor(config_of(out, collect=EVERYTHING)).watch(model, optimizer) as monitor:
        for step in range(3):
            inputs, targets = batch(step)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
            held = {
                "gradient": {n: p.grad.clone() for n, p in model.named_parameters()},
                "parameter": {n: p.detach().clone() for n, p in model.named_parameters()},
            }
            if step:
                for key in ("exp_avg", "exp_avg_sq"):
                    held[key] = {n: optimizer.state[p][key].clone() for n, p in model.named_parameters()}
            optimizer.step()
            monitor.flush()
            for quantity, tensors in held.items():
                rows = monitor.metrics(quantity)
                assert rows.keys() == tensors.keys()
                for name, tensor in tensors.items():
                    assert_row(rows[name], tensor)


def test_activations_and_their_gradients(out):
    model = new_model()
    optimizer = adamw(model)
    seen, grads = {}, {}

    def keep(name):
        def hook(_module, _args, output):
            seen[f"{name}.output.0".removeprefix(".")] = output.detach().clone()
            output.register_hook(lambda g: grads.update({f"{name}.output.0".removeprefix("."): g.clone()}))

        return hook

    with trainsentry.TrainMonitor(config_of(out, collect=EVERYTHING)).watch(model, optimizer) as monitor:
        for name, module in model.named_modules():
            if not isinstance(module, nn.ModuleList):
                module.register_forward_hook(keep(name))
        inputs, targets = batch(0)
        F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        monitor.flush()
        for quantity, held in (("activation_output", seen), ("activation_grad_output", grads)):
            rows = monitor.metrics(quantity)
            assert set(held) <= set(rows), quantity
            for name, tensor in held.items():
                assert_row(rows[name], tensor)


class Odd(nn.Module):
    """Weights of odd sizes and dtypes, unaligned views among them, with values that are hard to sum."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList()
        generator = torch.Generator().manual_seed(0)
        for dtype in DTYPES:
            for size in SIZES:
                flat = torch.randn(size + 1, generator=generator).to(dtype).to(DEVICE)
                self.weights.append(nn.Parameter(flat[1:]))  # an address that is no multiple of 16 bytes
                self.weights.append(nn.Parameter(flat[:-1].clone()))
        for values in ([1.0, math.nan, math.inf, -math.inf, 0.0], [math.nan, -math.inf], [3e38] * 1000, [1e-45] * 10):
            self.weights.append(nn.Parameter(torch.tensor(values, device=DEVICE)))
        self.weights.append(nn.Parameter(torch.randn(5_000_000, generator=generator).to(DEVICE)))  # many partial rows
        self.weights.append(nn.Parameter(torch.randn(40, 30, generator=generator).to(DEVICE).t()))
        self.weights.append(nn.Parameter(torch.randn(40, generator=generator).double().to(DEVICE)))
        self.weights.append(nn.Parameter(torch.tensor(-2.5, device=DEVICE)))


def test_odd_sizes_dtypes_views_and_values(out):
    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    config = config_of(out, collect=EVERYTHING, detect=False, on_incident=False)
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        held = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()  # an update by nothing makes NaN of an infinite weight
        monitor.flush()
        for quantity in ("parameter", "gradient"):
            rows = monitor.metrics(quantity)
            for name, tensor in held.items():
                assert_row(rows[name], tensor)


def test_a_loss_and_a_scale_that_lie_on_the_device_are_recorded_as_they_are(out):
    model = new_model()
    optimizer = adamw(model, fused=True)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=1024.0)
    watch = trainsentry.TrainMonitor(config_of(out)).watch(model, optimizer, grad_scaler=scaler)
    losses, norms = [], []
    with watch as monitor:
        for step in range(4):
            inputs, targets = batch(step)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            scaler.scale(loss).backward()
            monitor.log(loss=loss, thousand=1000)
            losses.append(loss.detach())
            norms.append(model.head.weight.grad.double().norm() / 1024.0)
            scaler.step(optimizer)
            scaler.update()
        records = monitor.records()
    value = records.set_index("quantity")["value"]
    assert value["loss"].tolist() == [loss.item() for loss in losses]
    assert value["thousand"].tolist() == [1000.0] * 4
    assert value["loss_scale"].tolist() == [1024.0] * 4
    rows = records[(records["quantity"] == "gradient") & (records["name"] == "head.weight")]
    assert rows["norm"].tolist() == pytest.approx([norm.item() for norm in norms], rel=1e-6)


class Images(nn.Module):
    """A channels-last network: its weights, gradients, state and activations are not in the order of their axes."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 6, 3)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.second(torch.relu(self.norm(self.first(x)))).mean((2, 3)))


def test_a_channels_last_model_is_read_where_it_lies(out):
    torch.manual_seed(0)
    last = torch.channels_last
    model = Images().to(DEVICE, memory_format=last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = {}
    with trainsentry.TrainMonitor(config_of(out, collect=EVERYTHING)).watch(model, optimizer) as monitor:
        for name in ("first", "norm", "second"):
            module = getattr(model, name)
            module.register_forward_hook(lambda _m, _a, y, name=name: seen.update({f"{name}.output.0": y.clone()}))
        for _ in range(3):
            x = torch.randn(4, 3, 9, 9).to(DEVICE, memory_format=last)
            optimizer.zero_grad()
            model(x).square().sum().backward()
            held = {"gradient": {name: p.grad.clone() for name, p in model.named_parameters()}}
            held["parameter"] = {name: p.detach().clone() for name, p in model.named_parameters()}
            held["activation_output"] = dict(seen)
            optimizer.step()
            monitor.flush()
            assert not seen["first.output.0"].is_contiguous()
        for quantity, tensors in held.items():
            rows = monitor.metrics(quantity)
            for name, tensor in tensors.items():
                assert_row(rows[name], tensor)
