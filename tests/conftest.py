"""Settings of every test: one thread, no accelerator, and a place to write.

Only the suite of `tests/on_device`, in a process of its own, sees the machine's accelerator. To all other tests every
machine is one without: kernels for accelerators run in Triton's interpreter, on tensors of the CPU.
"""

import os

if "TRAINSENTRY_TEST_DEVICE" not in os.environ:
    # Before anything imports Triton or starts CUDA. The interpreter would follow addresses of a device's memory.
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"  # of every process that a test starts: threads that wait for each other spin

import gc
from importlib.util import find_spec

os.environ["TRAINSENTRY_REPORT"] = "0"  # a process more at each end of hundreds of runs; its own test asks for it

import pytest


def pytest_collection_finish():
    """Leave modules and tests, which live to the end, out of every later garbage collection: half a second each."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    if find_spec("torch") is not None:  # MindSpore's tests run without it
        import torch

        torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _forked_recorders():
    from forked_recorders import forked_recorders

    with forked_recorders():
        yield


@pytest.fixture
def out(tmp_path):
    """A fresh output directory."""
    return tmp_path / "monitor_output"


def _pool(size):
    from forked_recorders import forked_recorders
    from rank_pool import RankPool

    pool = RankPool(size, recorders=forked_recorders)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def two_ranks():
    """Two ranks that live as long as the test session."""
    yield from _pool(2)


@pytest.fixture(scope="session")
def four_ranks():
    """Four of them."""
    yield from _pool(4)
