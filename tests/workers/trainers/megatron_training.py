"""Training with Megatron-core's own data parallelism and optimizers, on the CPU."""

import torch
import torch.distributed as dist
from cpu_as_cuda import CpuAsCuda
from strategy import make_net

import trainsentry

EVERY = {part: {"every": 1} for part in ("gradients", "parameters", "optimizer_state", "updates")}


def whole_of(parts, ranks):
    """Return the whole tensors' norms from every rank's {name: flat part}."""
    found = [None] * ranks
    dist.all_gather_object(found, parts)
    names = {name for each in found for name in each}
    return {n: float(torch.cat([each[n].double() for each in found if n in each]).norm()) for n in names}


def built(dtype, loss_scale):
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    half = {"bf16": dtype == "bfloat16", "fp16": dtype == "float16"}
    net = make_net(getattr(torch, dtype))
    model = DistributedDataParallel(
        TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, **half),
        DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=False),
        net,
    )
    scale = {"initial_loss_scale": loss_scale, "hysteresis": 1, "min_loss_scale": 1.0} if loss_scale else {}
    config = OptimizerConfig(optimizer="adam", lr=1e-2, use_distributed_optimizer=True, clip_grad=0.1, **half, **scale)
    return model, get_megatron_optimizer(config, [model])


def sharded(out, dtype, loss_scale=None, overflow_at=None):
    """Train three steps with the distributed optimizer; return the whole tensors' norms of each step that updated."""
    current, torch.cuda.current_device = torch.cuda.current_device, lambda: "cpu"
    try:
        with CpuAsCuda():
            model, chained = built(dtype, loss_scale)
            return _trained(out, model, chained, getattr(torch, dtype), overflow_at)
    finally:
        torch.cuda.current_device = current


def _trained(out, model, chained, dtype, overflow_at):
    rank, size = dist.get_rank(), dist.get_world_size()
    distributed = chained.chained_optimizers[0]
    steps = []

    def before_inner(optimizer, args, kwargs):
        gradients, weights = {}, {}
        half = zip(distributed.model_float16_groups, distributed.shard_fp32_from_float16_groups, strict=True)
        names = {id(p): name.removeprefix("module.") for name, p in model.named_parameters()}
        for owners, shards in half:
            for owner, shard in zip(owners, shards, strict=True):
                gradients[names[id(owner)]], weights[names[id(owner)]] = shard.grad.clone(), shard.detach().clone()
        steps.append({"gradient": whole_of(gradients, size), "parameter": whole_of(weights, size)})

    distributed.optimizer.register_step_pre_hook(before_inner)
    monitor = trainsentry.TrainMonitor({"output_dir": str(out), "strict": True, "collect": EVERY})
    with monitor.watch(model, chained):
        generator = torch.Generator().manual_seed(rank)
        for step in range(3):
            model.zero_grad_buffer()
            x = torch.randn(4, 7, generator=generator) * (1e30 if step == overflow_at else 1)
            loss = model(x.to(dtype)).float().square().mean()
            chained.scale_loss(loss).backward()
            model.finish_grad_sync()
            chained.step()
    return steps
