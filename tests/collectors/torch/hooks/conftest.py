"""Each test starts with an empty compiler."""

import pytest


@pytest.fixture
def fresh_compiler():
    """Forget what dynamo has compiled and counted, before the test and after it."""
    import torch
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
