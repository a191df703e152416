"""Recorders start here as they do for users: from nothing."""

import pytest
from forked_recorders import STARTED_FROM_NOTHING

from trainsentry.monitor.recorder import start


@pytest.fixture(autouse=True)
def _from_nothing(monkeypatch):
    monkeypatch.setattr(start, "ProcessRecorder", STARTED_FROM_NOTHING)
