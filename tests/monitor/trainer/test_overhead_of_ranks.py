"""All ranks take the same decision on the budget, and no rank waits for one that has failed."""

import json
import socket
import subprocess
import sys

import pytest

SCRIPT = """
import functools, os, sys
import torch, torch.distributed as dist
import trainsentry
from trainsentry.collectors import guard
from trainsentry.collectors.torch.watch import TorchWatch
from trainsentry.monitor.ranks import rank_group
from trainsentry.monitor.trainer import overhead

rank, case, out = int(os.environ["RANK"]), sys.argv[1], sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo")
now = [0.0]
guard.perf_counter_ns = lambda: round(now[0] * 1e9)
rank_group.PATIENCE_SECONDS = 3.0
overhead.Cost = functools.partial(overhead.Cost, clock=lambda: now[0])
read = TorchWatch._read_gradients

def read_slowly(self, optimizer):
    if "gradients" in self._plan:
        now[0] += 0.02 if rank == 1 else 0.0001
    read(self, optimizer)

TorchWatch._read_gradients = read_slowly
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
config = {"output_dir": out, "overhead_budget": 0.01, "detect": False}
if case == "left_out":
    config["ranks"] = [1]
monitor = trainsentry.TrainMonitor(config).watch(model, optimizer)
for step in range(60):
    if case == "failed" and rank == 0 and step == 12:
        monitor._guard.report("step boundary", RuntimeError("planted"))
    model(torch.randn(4, 8)).sum().backward()
    now[0] += 0.1
    optimizer.step()
    optimizer.zero_grad()
monitor.close()
dist.barrier()
dist.destroy_process_group()
"""


def run_ranks(tmp_path, case):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, script, case, tmp_path / "out"],
            env={
                "PATH": "",
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            _, log = process.communicate(timeout=600)
            assert process.returncode == 0, log
    finally:
        for process in processes:
            process.kill()
    return {rank: told(tmp_path / "out" / f"rank{rank}" / "sampling.jsonl") for rank in range(2)}


def told(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else None


def test_the_slowest_rank_decides_for_all(tmp_path):
    sampling = run_ranks(tmp_path, "common")
    assert [(line["step"], line["every"]) for line in sampling[0]] == [
        (line["step"], line["every"]) for line in sampling[1]
    ]
    assert sampling[0][-1]["every"]["gradients"] == 32


@pytest.mark.parametrize("case", ["left_out", "failed"])
def test_a_rank_that_is_left_out_or_has_failed_is_not_waited_for(tmp_path, case):
    sampling = run_ranks(tmp_path, case)
    assert (sampling[0] is None) == (case == "left_out")
    assert sampling[1][-1]["every"]["gradients"] == 32
