"""The suite of an accelerator, in a process of its own: `make test-device`."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts: the same sums in every run
sys.path.insert(0, str(Path(__file__).parent / "helpers"))

collect_ignore_glob = ["test_*.py"]
if find_spec("torch") is not None:
    import torch
    from the_device import DEVICE, NOTHING_TO_TEST

    if DEVICE is None:
        here = Path(__file__).parent
        collect_ignore_glob = [path.name for path in here.glob("test_*.py") if path.name != "test_the_device.py"]

        def pytest_terminal_summary(terminalreporter):
            if not terminalreporter.hasopt("s"):  # pytest says it itself
                terminalreporter.write_line(f"tests/on_device: skipped, {NOTHING_TO_TEST}")

    else:
        collect_ignore_glob = []

        @pytest.fixture(autouse=True)
        def _deterministic():
            torch.use_deterministic_algorithms(mode=True, warn_only=True)
            yield
            torch.use_deterministic_algorithms(mode=False)

        @pytest.fixture(autouse=True)
        def _no_debugger_is_left():
            from trainsentry import PrecisionDebugger

            yield
            PrecisionDebugger.close()
