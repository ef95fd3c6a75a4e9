"""Worker processes for pipelines of one process per stage."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ranks import Ranks, start_ranks


@pytest.fixture(scope="session")
def three() -> Iterator[Ranks]:
    with start_ranks(3) as made:
        yield made


@pytest.fixture(scope="session")
def four() -> Iterator[Ranks]:
    with start_ranks(4) as made:
        yield made
