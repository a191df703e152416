"""Whatever holds the optimizer, `watch` finds the torch optimizer inside it, and reads what that one takes."""

import contextlib
import importlib
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from cpu_as_cuda import CpuAsCuda
from tiny_models import EVERY_STEP
from torch import nn

import trainsentry
from trainsentry.collectors.torch.optimizers.wrappers import OptimizerWrapper, register_wrapper, unregister_wrapper

STEPS = 3


def net(width=16, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 16)).to(dtype)


class Loop:
    """A training loop: what `watch` is given, the torch optimizer inside it, and what the loop calls."""

    def __init__(self, model, given, inner):
        self.model, self.given, self.inner = model, given, inner
        self.zero_grad, self.backward = given.zero_grad, torch.Tensor.backward
        self.context = contextlib.nullcontext

    def step(self):
        """Step as the loop does: `watch` may have wrapped the attribute."""
        self.given.step()

    def run(self):
        """Train; return the norms that the inner optimizer takes at each step, by quantity and place."""
        taken = []
        self.inner.register_step_pre_hook(lambda *_: taken.append(norms(self.inner)))
        dtype = next(self.model.parameters()).dtype
        generator = torch.Generator().manual_seed(1)
        for _ in range(STEPS):
            loss = self.model(torch.randn(4, 8, generator=generator).to(dtype)).float().square().mean()
            self.backward(loss)
            self.step()
            self.zero_grad()
        return taken


def norms(optimizer):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.main_grad if p.grad is None else p.grad for p in parameters]
    return {
        "gradient": sorted(float(g.double().norm()) for g in gradients),
        "parameter": sorted(float(p.detach().double().norm()) for p in parameters),
    }


def accelerated():
    accelerate = pytest.importorskip("accelerate")
    accelerator, model = accelerate.Accelerator(cpu=True), net()
    inner = torch.optim.AdamW(model.parameters())
    loop = Loop(*accelerator.prepare(model, inner), inner)
    loop.backward = accelerator.backward
    return loop


def of_lightning():
    optimizer = pytest.importorskip("lightning.pytorch.core.optimizer")
    model = net()
    inner = torch.optim.AdamW(model.parameters())
    loop = Loop(model, optimizer.LightningOptimizer(inner), inner)
    loop.step = inner.step  # its own asks for a Trainer; test_lightning has one
    return loop


def of_fabric():
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    model = net()
    inner = torch.optim.AdamW(model.parameters())
    loop = Loop(*fabric.setup(model, inner), inner)
    loop.backward = fabric.backward
    return loop


def schedule_free():
    model = net()
    optimizer = pytest.importorskip("schedulefree").AdamWScheduleFree(model.parameters())
    optimizer.train()
    return Loop(model, optimizer, optimizer)


def schedule_free_wrapper():
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    wrapper = pytest.importorskip("schedulefree").ScheduleFreeWrapper(inner)
    wrapper.train()
    return Loop(model, wrapper, inner)


def plain(kind, **settings):
    model = net(width=512)  # low-precision state begins at 4096 elements
    optimizer = kind(model.parameters(), **settings)
    return Loop(model, optimizer, optimizer)


def low_precision(name):
    kind = getattr(pytest.importorskip("torchao.optim"), name)
    torch.compiler.set_stance("force_eager")  # its step compiles itself
    return plain(kind)


def eight_bits():
    return plain(pytest.importorskip("bitsandbytes").optim.AdamW8bit)


def multi_tensor():
    return plain(importlib.import_module("torch.optim._multi_tensor").AdamW)


def local_sgd():
    from torch.distributed.algorithms.model_averaging.averagers import ModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    class Never(ModelAverager):
        def __init__(self):
            self.step = 0

        def average_parameters(self, params):
            self.step += 1

    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    return Loop(model, PostLocalSGDOptimizer(inner, Never()), inner)


def container():
    """A stand-in after torchtitan's interface: it is an optimizer of all parameters, and steps those inside it."""

    class OptimizersContainer(torch.optim.Optimizer):
        __module__ = "torchtitan.components.optimizer"

        def __init__(self, optimizers):
            self.optimizers = optimizers
            super().__init__([p for o in optimizers for g in o.param_groups for p in g["params"]], {})

        def step(self):
            for optimizer in self.optimizers:
                optimizer.step()

        def zero_grad(self):
            for optimizer in self.optimizers:
                optimizer.zero_grad()

    model = net()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Loop(model, OptimizersContainer([inner]), inner)


def fp32_masters():
    """Half-precision weights, and an optimizer of fp32 copies."""
    model = net(dtype=torch.bfloat16)
    masters = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
    inner = torch.optim.AdamW(masters, lr=0.01)
    loop = Loop(model, inner, inner)

    def step():
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float()
        inner.step()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            parameter.data.copy_(master)

    loop.step, loop.zero_grad = step, model.zero_grad
    return loop


class FromMainGrad(torch.optim.SGD):
    """Takes `main_grad`, as optimizers beside fused gradient accumulation do."""

    def step(self):
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(group["lr"] * parameter.main_grad)


def main_gradients():
    loop = plain(FromMainGrad, lr=0.01)

    def backward(loss):
        loss.backward()
        for parameter in loop.model.parameters():
            parameter.main_grad = parameter.grad.float()
            parameter.grad = None

    loop.backward = backward
    return loop


def megatron(kind, dtype):
    core = pytest.importorskip("megatron.core.optimizer.optimizer")
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state = importlib.import_module("megatron.core.parallel_state")
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    with CpuAsCuda():
        model = net(dtype=dtype)
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        config = core.OptimizerConfig(bf16=dtype == torch.bfloat16, clip_grad=0.5)
        extra = (None,) if kind != "FP32Optimizer" else ()
        given = getattr(core, kind)(inner, config, *extra, lambda *_: None)
        loop = Loop(model, core.ChainedOptimizer([given]), inner)

    def backward(loss):
        loss.backward()
        for parameter in model.parameters():
            parameter.main_grad = parameter.grad.float()
            parameter.grad = None

    loop.backward, loop.context = backward, CpuAsCuda
    return loop


LOOPS = {
    "accelerate": accelerated,
    "lightning": of_lightning,
    "fabric": of_fabric,
    "schedulefree": schedule_free,
    "schedulefree wrapper": schedule_free_wrapper,
    "torchao 8 bits": lambda: low_precision("AdamW8bit"),
    "torchao 4 bits": lambda: low_precision("AdamW4bit"),
    "bitsandbytes": eight_bits,
    "multi_tensor": multi_tensor,
    "foreach": lambda: plain(torch.optim.AdamW, foreach=True),
    "fused": lambda: plain(torch.optim.AdamW, fused=True),
    "local SGD": local_sgd,
    "torchtitan": container,
    "fp32 masters": fp32_masters,
    "main_grad": main_gradients,
    "Megatron fp32": lambda: megatron("FP32Optimizer", torch.float32),
    "Megatron bf16": lambda: megatron("Float16OptimizerWithFloat16Params", torch.bfloat16),
}


@pytest.fixture(autouse=True)
def _as_it_was():
    yield
    torch.compiler.set_stance("default")
    if torch.distributed.is_initialized():
        with contextlib.suppress(ImportError):
            importlib.import_module("megatron.core.parallel_state").destroy_model_parallel()
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", LOOPS)
def test_what_the_inner_optimizer_takes_is_what_is_recorded_and_training_is_the_same_to_the_bit(name, out):
    bare = LOOPS[name]()
    with bare.context():
        bare.run()
    loop = LOOPS[name]()
    config = {"output_dir": str(out), "collect": EVERY_STEP, "strict": True, "detect": False}
    with loop.context(), trainsentry.TrainMonitor(config).watch(loop.model, loop.given):
        taken = loop.run()
    for quantity in ("gradient", "parameter"):
        rows = pd.read_csv(out / "rank0" / f"{quantity}_0-999.csv")
        assert sorted(rows.step.unique()) == list(range(STEPS)), "a step of the inner optimizer is a step"
        assert set(rows.name) == {"0.weight", "0.bias", "2.weight", "2.bias"}, "the model's own names"
        for step, expected in enumerate(taken):
            assert sorted(rows[rows.step == step].norm) == pytest.approx(expected[quantity], rel=1e-5), (quantity, step)
    for ours, theirs in zip(loop.model.parameters(), bare.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["torchao 8 bits", "torchao 4 bits"])
def test_low_precision_state_is_read_as_the_numbers_that_it_stands_for(name, out):
    loop = LOOPS[name]()
    config = {"output_dir": str(out), "collect": EVERY_STEP, "strict": True, "detect": False}
    weight, norm_at = loop.model[0].weight, []
    with trainsentry.TrainMonitor(config).watch(loop.model, loop.given):
        loop.inner.register_step_pre_hook(lambda *_: norm_at.append(_norm_of(loop.inner.state.get(weight))))
        loop.run()
    rows = pd.read_csv(out / "rank0" / "exp_avg_0-999.csv").set_index(["name", "step"])
    for step in range(1, STEPS):
        assert norm_at[step] > 0
        assert rows.loc[("0.weight", step), "norm"] == pytest.approx(norm_at[step])


def _norm_of(state):
    return float(state["exp_avg"].dequantize().double().norm()) if state else None


@pytest.mark.parametrize("library", ["Megatron", "apex"])
def test_masters_are_found_by_what_a_library_has_noted_even_where_values_differ(out, library):
    loop = fp32_masters()
    masters = loop.inner.param_groups[0]["params"]
    if library == "apex":
        lists = {"all_fp16_params": list(loop.model.parameters()), "all_fp32_from_fp16_params": masters}
        loop.inner._amp_stash = SimpleNamespace(**lists)
    for master, parameter in zip(masters, loop.model.parameters(), strict=True):
        if library == "Megatron":
            parameter.main_param = master
        master.data += 1
    with trainsentry.TrainMonitor({"output_dir": str(out), "strict": True}).watch(loop.model, loop.given) as monitor:
        loop.run()
        assert len(monitor.metrics("gradient")) == 4


def test_an_optimizer_of_a_copy_of_the_model_is_refused(out):
    """A copy of the same precision is no master: the optimizer would train another model."""
    model, copy = net(), net()
    with pytest.raises(ValueError, match="none of the parameters of SGD belongs to the watched model"):
        trainsentry.TrainMonitor({"output_dir": str(out)}).watch(model, torch.optim.SGD(copy.parameters(), lr=0.1))


class Unknown(torch.optim.Optimizer):
    """Looks like an optimizer, and has none of its hooks."""

    def __init__(self, base):
        self.base = base


class Other:
    """Does not even look like one."""

    def __init__(self, base):
        self.base = base


def test_an_optimizer_that_skipped_its_base_class_is_told_so(out):
    model = net()
    given = Unknown(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(
        TypeError, match=r"its __init__ did not call that of torch\.optim\.Optimizer; pass the optimizer in"
    ):
        trainsentry.TrainMonitor({"output_dir": str(out)}).watch(model, given)


@pytest.mark.parametrize("wrapper", [Unknown, Other])
def test_an_unknown_wrapper_is_refused_with_the_attribute_to_pass_and_accepted_once_it_is_registered(wrapper, out):
    model = net()
    given = wrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(
        TypeError, match=rf"got {wrapper.__name__}, .* pass the optimizer in its attribute base \(SGD\)"
    ):
        trainsentry.TrainMonitor({"output_dir": str(out)}).watch(model, given)
    kind = OptimizerWrapper(wrapper.__module__.partition(".")[0], wrapper.__name__, "base")
    register_wrapper(kind)
    try:
        with trainsentry.TrainMonitor({"output_dir": str(out)}).watch(model, given) as monitor:
            model(torch.ones(1, 8)).sum().backward()
            given.base.step()
            assert len(monitor.metrics("gradient")) == 4
    finally:
        unregister_wrapper(kind)
