"""Worker processes that the distributed tests share: started when first needed, killed at the end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ranks import Ranks


def _crew(n: int) -> Iterator[Ranks]:
    crew = Ranks(n)
    yield crew
    crew.stop()


@pytest.fixture(scope="session")
def two() -> Iterator[Ranks]:
    yield from _crew(2)


@pytest.fixture(scope="session")
def four() -> Iterator[Ranks]:
    yield from _crew(4)
