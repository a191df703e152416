"""A place where the ranks of a test meet."""

import pytest
from rendezvous_endpoint import free_endpoint


@pytest.fixture
def endpoint():
    """An endpoint at a free port of this machine."""
    return free_endpoint()
