"""Ranks that live as long as the test session."""

import pytest
from rank_pool import RankPool


def _pool(size):
    pool = RankPool(size)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def two_ranks():
    yield from _pool(2)


@pytest.fixture(scope="session")
def four_ranks():
    yield from _pool(4)
