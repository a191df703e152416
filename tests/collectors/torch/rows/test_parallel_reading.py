"""torch's own threads read large tensors: the rows are the same, and no thread is added or waited for."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from trainsentry.collectors.statistics import COLUMNS
from trainsentry.collectors.torch.rows import host_statistics
from trainsentry.collectors.torch.rows.host_statistics import parallel_region

pytestmark = pytest.mark.skipif(not parallel_region(), reason="torch's threads are not those of an OpenMP runtime")

PIECE = 2**16
"""Elements that one thread takes at a time."""


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.ones(4 * PIECE).exp()  # torch has its workers from here on
    yield
    torch.set_num_threads(before)


def rows_of(tensors, parallel, eps=0.0):
    rows = np.zeros((len(tensors), COLUMNS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_statistics, "PARALLEL", parallel)
        host_statistics.read_many_at([x.data_ptr() for x in tensors], tensors, eps, rows.ctypes.data)
    return rows


def odd_tensors(dtype):
    """Tensors around the length of a piece; what is not finite lies in the first, a middle, or the last piece."""
    generator = torch.Generator().manual_seed(3)
    sizes = [0, 1, 1000, PIECE - 1, PIECE, PIECE + 1, 5 * PIECE + 17]
    tensors = [torch.randn(n, generator=generator).to(dtype) for n in sizes]
    for place, value in [(0, float("nan")), (2 * PIECE + 5, float("inf")), (-1, -float("inf"))]:
        spoiled = torch.randn(4 * PIECE + 3, generator=generator).to(dtype)
        spoiled[place] = value
        tensors.append(spoiled)
    tensors.append(torch.full((3 * PIECE,), float("nan"), dtype=dtype))
    return tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_rows_are_the_same_to_the_bit_however_many_threads_read(two_threads, dtype):
    tensors = odd_tensors(dtype)
    shared = rows_of(tensors, parallel_region(), eps=0.1)
    alone = rows_of(tensors, 0, eps=0.1)
    one_by_one = np.concatenate([rows_of([x], 0, eps=0.1) for x in tensors])
    assert shared.tobytes() == alone.tobytes() == one_by_one.tobytes()
    assert (shared[:, 4] > 0).sum() == 2
    assert (shared[:, 5] > 0).sum() == 2


def test_doubles_beyond_the_range_of_squares_are_shared_too(two_threads):
    x = torch.full((4 * PIECE,), 1e200, dtype=torch.float64)
    assert rows_of([x], parallel_region())[0, 3] == pytest.approx(1e200 * 2 * 2**8)


def test_no_thread_comes_into_being(two_threads):
    x = torch.randn(8 * PIECE)
    before = len(list(Path("/proc/self/task").iterdir()))
    for _ in range(20):
        rows_of([x], parallel_region())
        x.exp()
    assert len(list(Path("/proc/self/task").iterdir())) == before


def test_torch_computes_with_as_many_threads_afterwards(two_threads):
    x = torch.randn(8 * PIECE)
    rows_of([x], parallel_region())
    assert torch.get_num_threads() == 2


def test_subnormal_numbers_are_not_taken_for_zeros_by_some_of_the_threads(two_threads):
    x = torch.full((8 * PIECE,), 1e-40)
    torch.set_flush_denormal(True)  # of this thread alone
    try:
        shared, alone = rows_of([x], parallel_region()), rows_of([x], 0)
        assert (x[:4] * 1).tolist() == [0.0] * 4  # and it still holds
    finally:
        torch.set_flush_denormal(False)
    assert shared.tobytes() == alone.tobytes()
    assert shared[0, 6] == 0.0
    assert shared[0, 3] == pytest.approx(1e-40 * 2**9.5, rel=1e-4)


TRAINING = """
import contextlib, multiprocessing, os, sys, torch, trainsentry
def compute(): torch.ones(1 << 20).exp()
def train():
    model = torch.nn.Sequential(*(torch.nn.Linear(100, 100) for _ in range(12)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    bare = sys.argv[1] == "bare"
    monitor = contextlib.nullcontext() if bare else trainsentry.TrainMonitor({"output_dir": sys.argv[1]})
    with monitor:
        if not bare: monitor.watch(model, optimizer)
        for _ in range(3):
            optimizer.zero_grad(); model(torch.ones(2, 100)).sum().backward(); optimizer.step()
def seconds_used(pid):
    try: return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[11:13]
    except OSError: return None
def in_child(function):
    child = multiprocessing.get_context("fork").Process(target=function)
    child.start()
    still, used = 0, None
    while child.is_alive() and still < 8:  # one that hangs uses no time at all; one that only starves uses some
        child.join(1)
        now = seconds_used(child.pid)
        still, used = (still + 1 if now == used else 0), now
    if child.is_alive(): child.kill(); print("the child hangs"); os._exit(3)
torch.set_num_threads(2)
"""


@pytest.mark.parametrize(
    "order", ["train(); in_child(compute)", "compute(); in_child(train)"], ids=["helper of a trainer", "trainer"]
)
def test_a_forked_child_ends_as_without_the_monitor(out, order):
    """Threads of the parent are not there in a child, which on some processors waits for them, watched or not."""

    def run(argument):
        command = [sys.executable, "-c", TRAINING + order, argument]
        return subprocess.run(command, capture_output=True, text=True, timeout=600)

    watched = run(str(out))
    if "the child hangs" in watched.stdout and "the child hangs" in run("bare").stdout:
        pytest.skip("the child hangs here without the monitor too")
    assert watched.returncode == 0, watched.stdout + watched.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_threads_it_has_not(two_threads):
    x = torch.randn(8 * PIECE)
    expected = rows_of([x], parallel_region())
    child = os.fork()
    if child == 0:
        same = rows_of([x], parallel_region()).tobytes() == expected.tobytes()
        os._exit(0 if same else 1)
    for _ in range(6000):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.05)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("the child hangs")
    assert status == 0
