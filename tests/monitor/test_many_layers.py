"""A model of very many layers is watched in little memory."""

import subprocess
import sys

import pytest

LAYERS = 5_000
MEGABYTES = 64  # 50 where it was measured, 17 of them the ring; allocators differ

WATCHING = """
import os, sys, torch, trainsentry
from trainsentry.monitor.frameworks import framework_of
torch.set_num_threads(1)
model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(int(sys.argv[2]))])
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 4)).sum().backward(); optimizer.step(); optimizer.zero_grad()
framework_of(model)
def held(): return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
before = held()
monitor = trainsentry.TrainMonitor({"output_dir": sys.argv[1]}).watch(model, optimizer)
print(held() - before)
monitor.close()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is asked for as on Linux")
def test_thousands_of_layers_are_watched_in_little_memory(tmp_path):
    command = [sys.executable, "-c", WATCHING, str(tmp_path), str(LAYERS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) < MEGABYTES * 1e6
