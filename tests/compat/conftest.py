"""Worker processes for pipelines of one process per stage."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ranks import Ranks


def _crew(n: int) -> Iterator[Ranks]:
    crew = Ranks(n)
    yield crew
    crew.stop()


@pytest.fixture(scope="session")
def three() -> Iterator[Ranks]:
    yield from _crew(3)


@pytest.fixture(scope="session")
def four() -> Iterator[Ranks]:
    yield from _crew(4)
