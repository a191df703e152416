"""Training goes on when descriptors or memory run out, unwatched if need be, with a message to the user."""

import resource
import sys

import pytest
from forked_scripts import Script, run_forked
from tiny_models import flip_bit, train
from watched import STEPS, make

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits are set as on Linux")


TRAINING = """
import os, resource, sys, torch, trainsentry
torch.set_num_threads(1)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
def train(steps):
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward(); optimizer.step(); optimizer.zero_grad()
train(1)
monitor = trainsentry.TrainMonitor({"output_dir": sys.argv[1]})
LIMIT
monitor.watch(model, optimizer)
train(5)
monitor.log(loss=1.0)
monitor.close()
print("trained", flush=True)
"""


DESCRIPTORS = """
used = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (used + SPARE, used + SPARE))
"""


MEMORY = """
import trainsentry.monitor.frameworks
trainsentry.monitor.frameworks.framework_of(model)
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (SPARE << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
"""


CASES = {
    **{f"descriptors-{spare}": (DESCRIPTORS, spare) for spare in (0, 1, 3, 6)},
    **{f"memory-{spare}": (MEMORY, spare) for spare in (2, 8, 24)},
}
"""What is limited, and how many descriptors or megabytes are left."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of each training under a limit, and how it ended."""
    root = tmp_path_factory.mktemp("trained")
    scripts = {
        name: Script(TRAINING.replace("LIMIT", limit.replace("SPARE", str(spare))), [root / name])
        for name, (limit, spare) in CASES.items()
    }
    ended = run_forked(scripts)
    return {name: (root / name, ended[name]) for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_without_descriptors_or_memory_the_training_goes_on(trained, name):
    out, done = trained[name]
    assert done.returncode == 0, done.stderr
    assert "trained" in done.stdout
    if not (out / "rank0").exists():
        assert "this run is not watched" in done.stderr


def test_many_open_files_do_not_matter(out):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1300:
        pytest.skip("the system allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1300), hard))
    files = [open("/dev/null") for _ in range(1100)]  # noqa: SIM115 - they are the point
    try:
        model, optimizer, monitor = make(out)
        with monitor:
            train(model, optimizer, STEPS, monitor, before_step=lambda s: flip_bit(model[2].weight) if s == 8 else None)
            monitor.flush()
            assert [i.name for i in monitor.incidents] == ["2.weight"]
        assert monitor._guard.failures == {}
    finally:
        for file in files:
            file.close()
