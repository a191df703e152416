"""A recorder that runs where a test can change it."""

import pytest


@pytest.fixture
def in_thread(monkeypatch):
    """Run recorders in a thread of this process, where a test can plant something in them."""
    from watched import start_with

    from trainsentry.monitor.recorder.start import ThreadRecorder

    start_with(monkeypatch, ThreadRecorder)
