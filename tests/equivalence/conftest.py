"""Worker processes that all files in here share: starting them takes longer than most cases."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.equivalence.ranks import Ranks, ranks
from tests.support import ranks as support


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    with ranks(2) as made:
        yield made


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    with ranks(4) as made:
        yield made


@pytest.fixture(scope="session")
def four() -> Iterator[support.Ranks]:
    """Four processes that run any function, as ``tests.support.ranks`` has it."""
    crew = support.Ranks(4)
    yield crew
    crew.stop()
