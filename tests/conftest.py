"""Fixtures that all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests.ranks import Ranks

# Inherited by the ranks. Two processes on two cores must not start a thread pool each.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)

settings.register_profile("default", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("default")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """A type of device, for tests that are the same on each."""
    name: str = request.param
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return name


@pytest.fixture(scope="session")
def one_rank() -> Iterator[Ranks]:
    ranks = Ranks(1)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[Ranks]:
    ranks = Ranks(3)
    yield ranks
    ranks.close()
