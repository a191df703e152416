"""The demo on several ranks of this machine: one rank has a fault, and the monitor names rank and layer.

Run as `python -m trainsentry.monitor.demo.ranks JSON` on each rank, with torchrun's environment variables. A rank
prints its messages as JSON, one per line.
"""

import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from trainsentry.collectors.torch.device.registry import device_of
from trainsentry.collectors.torch.rows.local_tensor import local
from trainsentry.monitor.demo.fault import BITS
from trainsentry.monitor.demo.model import Gpt, GptConfig
from trainsentry.monitor.demo.outcome import Flip
from trainsentry.monitor.demo.training import BATCH, LEARNING_RATE, Batches, rate
from trainsentry.monitor.errors import TrainingStopped
from trainsentry.monitor.train_monitor import TrainMonitor


@dataclass(frozen=True)
class DemoTask:
    """The settings of a rank's run; `fault_rank` is the rank with the fault, -1 for none."""

    config: dict[str, Any]
    strategy: str
    steps: int
    seed: int
    fault: str
    fault_rank: int
    fault_parameter: str | None
    device: str = "cpu"


def start_ranks(task: DemoTask, ranks: int) -> "list[subprocess.Popen[str]]":
    """Start the ranks on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "GROUP_WORLD_SIZE": "1"}
    shared |= {"LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": task.device}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "trainsentry.monitor.demo.ranks", json.dumps(asdict(task))],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]


def messages_of(process: "subprocess.Popen[str]") -> Iterator[dict[str, Any]]:
    """Yield a rank's messages as they arrive; skip its other output."""
    for line in process.stdout or ():
        if line.startswith('{"demo"'):
            yield json.loads(line)["demo"]


def run_rank(task: DemoTask) -> None:
    """Train one rank's share, and flip a bit midway if this rank has the fault."""
    torch.set_num_threads(1)
    device = _join_group(task.device)
    torch.manual_seed(task.seed)
    trained = _STRATEGIES[task.strategy](Gpt(GptConfig()).to(device))
    rank = dist.get_rank()
    batches = Batches(BATCH, GptConfig().context, task.seed * 1000 + rank)
    with TrainMonitor(task.config).watch(trained.model, trained.optimizer) as monitor:
        try:
            for step in range(task.steps):
                tokens, targets = (part.to(device) for part in batches.draw())
                if step == task.steps // 2 and rank == task.fault_rank:
                    flip = _flip(trained.held(), task)
                    _send(flip={**asdict(flip), "step": step, "rank": rank})
                loss = trained.loss(tokens, targets)
                monitor.log(loss=loss)
                if rank == 0:
                    _send(step=step, loss=loss.item())
                trained.update(LEARNING_RATE * rate(step, task.steps))
        except TrainingStopped as stop:
            _send(stopped=stop.step, rank=rank)
    dist.barrier()
    os._exit(0)  # skip the frameworks' teardown


def _join_group(kind: str) -> torch.device:
    """Join the process group, over the backend of the device; return this rank's device."""
    seam = device_of(kind)
    if seam.on_host:
        dist.init_process_group(seam.collectives)
        return torch.device(kind)
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]))
    seam.make_current(device)
    dist.init_process_group()  # gloo for tensors of the CPU, the device's own backend for its tensors
    return device


class _Ddp:
    """Every rank holds all parameters; gradients are averaged."""

    def __init__(self, model: nn.Module) -> None:
        self.plain = model
        self.model: Any = nn.parallel.DistributedDataParallel(model)
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        return loss.detach()

    def update(self, learning_rate: float) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad()

    def held(self) -> dict[str, Tensor]:
        """Return this rank's part of each parameter, as the optimizer updates it."""
        return {name: p.data for name, p in self.plain.named_parameters()}  # torch counts no write to a fault


class _Fsdp2(_Ddp):
    """Every rank holds a shard of each parameter (`fully_shard`)."""

    def __init__(self, model: nn.Module) -> None:
        from torch.distributed.fsdp import fully_shard

        kind = next(model.parameters()).device.type
        mesh = dist.device_mesh.init_device_mesh(kind, (dist.get_world_size(),))
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self.plain = self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)

    def held(self) -> dict[str, Tensor]:
        return {name: local(p).data for name, p in self.plain.named_parameters()}


class _Zero3(_Ddp):
    """DeepSpeed's ZeRO stage 3: parameters, gradients and state are partitioned."""

    def __init__(self, model: nn.Module) -> None:
        import deepspeed

        # Otherwise it compiles an inference extension, under a lock that outlives a killed process.
        deepspeed.ops.__compatible_ops__ = {}
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
        config = {
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        self.plain = model
        self.model, self.optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
        self.model.backward(loss)
        return loss.detach()

    def update(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.model.step()

    def held(self) -> dict[str, Tensor]:
        """Return the partitions that the optimizer updates; they are contiguous, in the model's order."""
        held: dict[str, Tensor] = {}
        names = {id(p): name for name, p in self.plain.named_parameters()}
        for parameters, flat in zip(
            self.optimizer.fp16_groups, self.optimizer.fp32_partitioned_groups_flat, strict=True
        ):
            start = 0
            for parameter in parameters:
                size = parameter.partition_numel()
                used = max(0, min(size, parameter.ds_numel - dist.get_rank() * size))
                held[names[id(parameter)]] = flat.data[start : start + used]
                start += size
        return held


_STRATEGIES: Mapping[str, type[_Ddp]] = {"ddp": _Ddp, "fsdp2": _Fsdp2, "zero3": _Zero3}


def _flip(held: Mapping[str, Tensor], task: DemoTask) -> Flip:
    """Set a clear bit in this rank's part of one parameter of the blocks."""
    choice = random.Random(task.seed)  # noqa: S311 - a fault, not a secret
    [bit] = choice.sample(BITS[task.fault], 1)
    names = [task.fault_parameter] if task.fault_parameter else [n for n in held if n.startswith("blocks")]
    for name in choice.sample(names, len(names)):
        flat = held[name].view(-1)
        words = flat.view(torch.int32)
        clear = (((words >> bit) & 1 == 0) & (flat != 0)).nonzero().flatten().tolist()
        if clear:
            element = choice.choice(clear)
            before = float(flat[element])
            words[element] ^= 1 << bit
            return Flip(name, element, bit, before, float(flat[element]))
    raise ValueError(f"--fault-parameter: rank {task.fault_rank} holds no element of {names[0]!r} with bit {bit} clear")


def _send(**message: Any) -> None:
    sys.stdout.write(json.dumps({"demo": message}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    run_rank(DemoTask(**json.loads(sys.argv[1])))
