"""The simulated NPU. Its tests run in a process of their own, as torch's PrivateUse1 has one name a process:
`pytest tests/simulated`; where other tests run too, they are left out."""

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def _is_alone(config):
    named = [Path(config.invocation_params.dir, argument.partition("::")[0]).resolve() for argument in config.args]
    return all(path == HERE or HERE in path.parents for path in named)


def pytest_collection_modifyitems(config, items):
    """Leave the folder out of a run of other tests; else give this process its NPUs."""
    if not _is_alone(config):
        here = [item for item in items if HERE in item.path.parents]
        config.hook.pytest_deselected(items=here)
        items[:] = [item for item in items if HERE not in item.path.parents]
        return
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton: tests of kernels run them on the host
    import simulated_npu

    try:
        simulated_npu.load()
    except simulated_npu.CannotBuild as error:
        pytest.exit(f"the simulated NPU is not tested: {error}", returncode=0)


@pytest.fixture(scope="session")
def two_npus():
    """Two ranks with a simulated NPU each, over hccl."""
    from rank_pool import RankPool
    from simulated_npu.hccl import init_process_group

    pool = RankPool(2, init_process_group)
    yield pool
    pool.close()


@pytest.fixture
def no_waiting():
    """Make it an error that the host waits for the device."""
    import torch

    torch.npu.set_sync_debug_mode("error")
    yield
    torch.npu.set_sync_debug_mode("default")


@pytest.fixture(autouse=True)
def _no_debugger_is_left():
    from trainsentry import PrecisionDebugger

    yield
    PrecisionDebugger.close()
