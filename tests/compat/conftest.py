"""Worker processes for pipelines of one process per stage."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ranks import Ranks


@pytest.fixture(scope="session")
def three() -> Iterator[Ranks]:
    crew = Ranks(3)
    yield crew
    crew.stop()


@pytest.fixture(scope="session")
def four() -> Iterator[Ranks]:
    crew = Ranks(4)
    yield crew
    crew.stop()
