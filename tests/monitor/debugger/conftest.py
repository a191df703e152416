"""No debugger outlives its test: there is one in a process."""

import pytest


@pytest.fixture(autouse=True)
def _no_debugger_is_left():
    from trainsentry import PrecisionDebugger

    yield
    PrecisionDebugger.close()
