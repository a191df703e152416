"""MindSpore's tests run in an environment of their own (`make test` builds it), without torch."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

os.environ.setdefault("GLOG_v", "3")  # MindSpore's log: errors only
sys.path[:0] = [str(Path(__file__).parent / folder) for folder in ("helpers", "workers", "../helpers/dumps")]

if find_spec("mindspore") is None:
    collect_ignore_glob = ["test_*.py", "*/test_*.py"]
else:
    import mindspore as ms

    @pytest.fixture(autouse=True)
    def _pynative(request, tmp_path, monkeypatch):
        """MindSpore hands each operation to other threads, which costs eight times the training on two busy cores.

        A module of tests with `ASYNCHRONOUS = True` trains as users do; all others do without.
        """
        monkeypatch.chdir(tmp_path)  # a graph that cannot be compiled leaves files where it was tried
        synchronous = not getattr(request.module, "ASYNCHRONOUS", False)
        ms.set_context(mode=ms.PYNATIVE_MODE, pynative_synchronize=synchronous)
        yield
        ms.set_context(mode=ms.PYNATIVE_MODE, pynative_synchronize=False)

    @pytest.fixture(autouse=True)
    def _no_debugger_is_left():
        from trainsentry import PrecisionDebugger

        yield
        PrecisionDebugger.close()
