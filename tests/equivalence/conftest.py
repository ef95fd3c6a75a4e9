"""Worker processes that all files in here share: starting them takes longer than most cases.

``two_ranks`` and ``four_ranks`` run the cases of ``tests.equivalence.ranks``, ``two`` and ``four`` any function.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.equivalence import ranks as cases
from tests.support.ranks import Ranks, start_ranks


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[cases.Ranks]:
    with cases.ranks(2) as made:
        yield made


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[cases.Ranks]:
    with cases.ranks(4) as made:
        yield made


@pytest.fixture(scope="session")
def two() -> Iterator[Ranks]:
    with start_ranks(2) as made:
        yield made


@pytest.fixture(scope="session")
def four() -> Iterator[Ranks]:
    with start_ranks(4) as made:
        yield made
