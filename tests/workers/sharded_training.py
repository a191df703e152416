"""One small model trained under every strategy, beside what its tensors really are, gathered whole in float64."""

import contextlib
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn

import trainsentry

LR = 1e-2


class Net(nn.Module):
    """Parameters of odd sizes: some smaller than the number of ranks, none that 2 or 4 divide evenly."""

    def __init__(self, hidden=13):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(7, hidden), nn.GELU(), nn.Linear(hidden, 5))
        self.norm = nn.LayerNorm(5)
        self.module = nn.Linear(5, 3)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.module(self.norm(self.inner(x))) * self.gain


def batches(steps, micro_steps=1, seed=0):
    """The same on every rank and in a single process: rank r of n takes rows r::n."""
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(8, 7, generator=generator) for _ in range(micro_steps)] for _ in range(steps)]


def make_net(dtype=torch.float32, hidden=13):
    torch.manual_seed(1)
    return Net(hidden).to(dtype)


class Strategy:
    """A model and its optimizer, distributed; `gathered` returns whole tensors by quantity and name."""

    accumulate_locally = False

    def __init__(self, dtype, micro_steps):
        self.micro_steps = micro_steps
        self.updates = 0
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.build(dtype)

    def build(self, dtype):
        self.plain = make_net(dtype)
        self.model = self.plain
        self.optimizer = self.make_optimizer(self.model.parameters())

    def make_optimizer(self, parameters):
        return torch.optim.AdamW(parameters, lr=LR)

    def share(self, x):
        return x[self.rank :: self.size]

    def step(self, micro_batches, poison=None):
        for i, x in enumerate(micro_batches):
            with self.context(i == len(micro_batches) - 1):
                out = self.model(self.share(x).to(self.input_dtype()))
                if poison is not None:
                    out = poison(self, out, i)
                (out.float().square().mean() / len(micro_batches)).backward()

    def input_dtype(self):
        return next(self.plain.parameters()).dtype

    def context(self, last):
        return contextlib.nullcontext()

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def whole(self, tensor):
        return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().double().clone()

    def names(self):
        return dict(self.model.named_parameters())

    def gathered(self, gradients=True):
        found = {"parameter": {}, "gradient": {}, "exp_avg": {}, "exp_avg_sq": {}}
        for name, parameter in self.names().items():
            found["parameter"][name] = self.whole(parameter)
            if parameter.grad is not None:
                found["gradient"][name] = self.whole(parameter.grad)
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if key != "step":
                    found[key][name] = self.whole(value)
        return found


class Plain(Strategy):
    def share(self, x):
        return x


class Ddp(Strategy):
    options: ClassVar[dict] = {}

    def build(self, dtype):
        self.plain = make_net(dtype)
        self.model = nn.parallel.DistributedDataParallel(self.plain, **self.options)
        self.optimizer = self.make_optimizer(self.model.parameters())

    def names(self):
        return dict(self.plain.named_parameters())

    def context(self, last):
        return contextlib.nullcontext() if last else self.model.no_sync()


class DdpStatic(Ddp):
    options: ClassVar[dict] = {"static_graph": True}

    def context(self, last):
        return contextlib.nullcontext()


class DdpUnused(Ddp):
    options: ClassVar[dict] = {"find_unused_parameters": True}


class DdpViews(Ddp):
    options: ClassVar[dict] = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001}


class ZeroRedundancy(Ddp):
    def make_optimizer(self, parameters):
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(list(parameters), torch.optim.AdamW, lr=LR)

    def gathered(self, gradients=True):
        found = super().gathered(gradients)
        mine = {name: self.optimizer.optim.state.get(p, {}) for name, p in self.names().items()}
        parts = [None] * self.size
        dist.all_gather_object(parts, {n: {k: v for k, v in s.items() if k != "step"} for n, s in mine.items()})
        for part in parts:
            for name, state in part.items():
                for key, value in state.items():
                    found[key][name] = value.double()
        return found


class Fsdp2(Strategy):
    reshard = True
    policy = None
    offload = False

    def mesh(self):
        return dist.device_mesh.init_device_mesh("cpu", (self.size,))

    def build(self, dtype):
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        self.plain = self.model = make_net(dtype)
        mixed = MixedPrecisionPolicy(param_dtype=self.policy) if self.policy else MixedPrecisionPolicy()
        options = {
            "mesh": self.mesh(),
            "reshard_after_forward": self.reshard,
            "mp_policy": mixed,
            "offload_policy": CPUOffloadPolicy(pin_memory=False) if self.offload else OffloadPolicy(),
        }
        fully_shard(self.model.inner, **options)
        fully_shard(self.model.norm, **options)
        fully_shard(self.model, **options)
        self.optimizer = self.make_optimizer(self.model.parameters())

    def context(self, last):
        self.model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()


class Fsdp2Kept(Fsdp2):
    reshard = False


class Fsdp2Mixed(Fsdp2):
    policy = torch.bfloat16


class Fsdp2Offload(Fsdp2):
    offload = True


class Hsdp(Fsdp2):
    def mesh(self):
        return dist.device_mesh.init_device_mesh("cpu", (2, self.size // 2), mesh_dim_names=("replicas", "shards"))


class TensorParallel(Strategy):
    def build(self, dtype):
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        self.plain = self.model = make_net(dtype, hidden=12)  # parallelize_module takes what divides evenly
        mesh = dist.device_mesh.init_device_mesh("cpu", (self.size,))
        parallelize_module(self.model, mesh, {"inner.0": ColwiseParallel(), "inner.2": RowwiseParallel()})
        self.optimizer = self.make_optimizer(self.model.parameters())

    def share(self, x):
        return x


class Fsdp1(Strategy):
    original = False
    sharding = "FULL_SHARD"

    def build(self, dtype):
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

        self.plain = make_net(dtype)
        options = {
            "use_orig_params": self.original,
            "sharding_strategy": ShardingStrategy[self.sharding],
            "device_id": torch.device("cpu"),
        }
        if self.sharding.startswith(("HYBRID", "_HYBRID")):
            options["device_mesh"] = dist.device_mesh.init_device_mesh("cpu", (2, self.size // 2))
        self.plain.inner = FullyShardedDataParallel(self.plain.inner, **options)
        self.model = FullyShardedDataParallel(self.plain, **options)
        self.optimizer = self.make_optimizer(self.model.parameters())

    def context(self, last):
        return contextlib.nullcontext() if last else self.model.no_sync()

    def gathered(self, gradients=True):
        from torch.distributed.fsdp import FullyShardedDataParallel

        found = {"parameter": {}, "gradient": {}, "exp_avg": {}, "exp_avg_sq": {}}
        summon = FullyShardedDataParallel.summon_full_params
        grads = self.sharding != "NO_SHARD" or not self.original
        with summon(self.model, with_grads=self.original, writeback=False):
            for raw, parameter in self.model.named_parameters():
                name = raw.replace("_fsdp_wrapped_module.", "")
                found["parameter"][name] = parameter.detach().double().clone()
                if self.original and grads and parameter.grad is not None:
                    found["gradient"][name] = parameter.grad.detach().double().clone()
        # Optimizer state has the parameters' layout, so it is gathered in their place.
        for key in ("exp_avg", "exp_avg_sq") if self.updates else ():
            kept = {p: p.data.clone() for p in self.model.parameters()}
            for parameter in kept:
                parameter.data.copy_(self.optimizer.state.get(parameter, {}).get(key, parameter.data))
            with summon(self.model, writeback=False):
                for raw, parameter in self.model.named_parameters():
                    found[key][raw.replace("_fsdp_wrapped_module.", "")] = parameter.detach().double().clone()
            for parameter, value in kept.items():
                parameter.data.copy_(value)
        return found


class Fsdp1Original(Fsdp1):
    original = True


class Fsdp1Grad(Fsdp1Original):
    sharding = "SHARD_GRAD_OP"


class Fsdp1None(Fsdp1Original):
    sharding = "NO_SHARD"


class Fsdp1Hybrid(Fsdp1):
    sharding = "HYBRID_SHARD"


class Fsdp1HybridGrad(Fsdp1Original):
    sharding = "_HYBRID_SHARD_ZERO2"


class DeepSpeed(Strategy):
    stage = 0
    offload = False

    def build(self, dtype):
        import logging

        import deepspeed

        deepspeed.utils.logging.logger.setLevel(logging.ERROR)
        # It would compile an extension for inference, behind a lock that outlives a killed process.
        deepspeed.ops.__compatible_ops__ = {}
        self.plain = make_net(dtype)
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": self.micro_steps,
            "zero_optimization": {"stage": self.stage},
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        if self.offload:
            config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        if dtype == torch.bfloat16:
            config["bf16"] = {"enabled": True}
        groups = [
            {"params": list(self.plain.inner.parameters())},
            {"params": [p for n, p in self.plain.named_parameters() if not n.startswith("inner")]},
        ]
        self.model, self.optimizer, _, _ = deepspeed.initialize(
            model=self.plain, optimizer=torch.optim.AdamW(groups, lr=LR), config=config
        )

    def step(self, micro_batches, poison=None):
        for i, x in enumerate(micro_batches):
            out = self.model(self.share(x).to(self.input_dtype()))
            if poison is not None:
                out = poison(self, out, i)
            self.model.backward(out.float().square().mean())
            if i < len(micro_batches) - 1:
                self.model.step()

    def update(self):
        self.model.step()

    def names(self):
        return dict(self.plain.named_parameters())

    def gathered(self, gradients=True):
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state

        if self.stage == 0 and self.optimizer.__class__.__name__ == "AdamW":
            return super().gathered(gradients)
        if self.stage == 0:
            return self.copies()
        found = {"parameter": {}, "gradient": {}, "exp_avg": {}, "exp_avg_sq": {}}
        for name, parameter in self.names().items():
            found["parameter"][name] = safe_get_full_fp32_param(parameter).double().clone()
            if gradients:
                found["gradient"][name] = safe_get_full_grad(parameter).double().clone()
            for key in ("exp_avg", "exp_avg_sq") if self.updates else ():
                if self.stage == 3 or self.stage == 0:
                    found[key][name] = safe_get_full_optimizer_state(parameter, key).double().clone()
                else:
                    found[key][name] = self.whole_state(parameter, key)
        return found

    def copies(self):
        """In bf16 without sharding every rank has a copy of each parameter in fp32; gradients are reduced later."""
        names = {id(p): n for n, p in self.names().items()}
        found = {"parameter": {}, "gradient": {}, "exp_avg": {}, "exp_avg_sq": {}}
        for narrow, wide in zip(self.optimizer.fp16_groups, self.optimizer.fp32_groups, strict=True):
            for parameter, copy in zip(narrow, wide, strict=True):
                found["parameter"][names[id(parameter)]] = copy.detach().double().clone()
                for key, value in self.optimizer.optimizer.state.get(copy, {}).items():
                    if key != "step":
                        found[key][names[id(parameter)]] = value.double().clone()
        return found

    def whole_state(self, parameter, key):
        """As `safe_get_full_optimizer_state`, whose tables lack what the second group's first step makes."""
        whole = torch.zeros(parameter.numel(), dtype=torch.float64)
        mapping = parameter._hp_mapping
        if mapping is not None:
            flat = self.optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
            here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
            part = self.optimizer.optimizer.state[flat][key].double().narrow(0, here.start, here.numel)
            whole.narrow(0, there.start, there.numel).copy_(part)
        dist.all_reduce(whole)
        return whole.reshape(parameter.shape)


class Zero1(DeepSpeed):
    stage = 1


class Zero2(DeepSpeed):
    stage = 2


class Zero3(DeepSpeed):
    stage = 3


class Zero2Offload(Zero2):
    offload = True


STRATEGIES = {
    cls.__name__: cls for cls in vars().copy().values() if isinstance(cls, type) and issubclass(cls, Strategy)
}


def train(name, out, *, dtype="float32", steps=5, micro_steps=1, config=None, poison=None, gather=True):
    """Train under a strategy while the monitor watches; return each step's whole tensors."""
    strategy = STRATEGIES[name](getattr(torch, dtype), micro_steps)
    everything = {part: {"every": 1} for part in ("gradients", "parameters", "optimizer_state", "updates")}
    everything["activations"] = {"every": 1}
    settings = {"output_dir": str(out), "collect": everything, "detect": False, "strict": True, **(config or {})}
    monitor = trainsentry.TrainMonitor(settings).watch(strategy.model, strategy.optimizer)
    found = []
    try:
        for micro_batches in batches(steps, micro_steps):
            strategy.step(micro_batches, poison)
            found.append(strategy.gathered() if gather else None)
            strategy.update()
            strategy.updates += 1
    finally:
        monitor.close()
    found.append(strategy.gathered(gradients=False) if gather else None)
    return found
