"""Rank processes that all files in here share: starting them takes longer than most cases."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ranks import Ranks, start_ranks


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    with start_ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    with start_ranks(4) as ranks:
        yield ranks
