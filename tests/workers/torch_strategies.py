"""The small model under torch's own strategies: DDP, ZeRO-1, FSDP1, FSDP2, hybrid and tensor parallel."""

import contextlib
from typing import ClassVar

import torch
import torch.distributed as dist
from strategy import LR, Strategy, make_net
from torch import nn


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
