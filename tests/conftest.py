"""Settings for all tests and for the programs that they start."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.support.ranks import Ranks

# torch resolves the host name of every process that connects to its store. Without a DNS server that takes seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Run every operator in the calling thread.

    Otherwise each worker thread of a pipeline has its own OpenMP threads, which spin while they wait for the next
    operator: with two of them, a small step takes ten times the CPU time.
    """
    import torch

    torch.set_num_threads(1)


# Rank processes that all files share: started when first needed, paused after each file, killed at the end.


def _ranks(n: int) -> Iterator[Ranks]:
    from tests.support.ranks import start_ranks

    with start_ranks(n) as made:
        yield made


@pytest.fixture(scope="session")
def two() -> Iterator[Ranks]:
    yield from _ranks(2)


@pytest.fixture(scope="session")
def three() -> Iterator[Ranks]:
    yield from _ranks(3)


@pytest.fixture(scope="session")
def four() -> Iterator[Ranks]:
    yield from _ranks(4)


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if (nextitem is None or nextitem.path != item.path) and "tests.support.ranks" in sys.modules:
        sys.modules["tests.support.ranks"].pause_all()


def pytest_collection_finish() -> None:
    """Exclude modules and tests from garbage collection."""
    gc.freeze()


_FIXTURES = {"two", "three", "four", "browser"}  # processes that several tests share
_STARTERS = {
    "subprocess",
    "multiprocessing",
    *(f"tests.support.{name}" for name in ("ranks", "programs", "rank_programs", "fork_python", "browser", "perfetto")),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that start processes, themselves or through functions of their module: ``make check`` omits them."""
    starting: dict[ModuleType, set[str]] = {}
    for item in items:
        if not isinstance(item, pytest.Function):
            continue
        names = starting.setdefault(item.module, _names_that_start_processes(vars(item.module)))
        if names & _names(item.function) or _FIXTURES & set(item.fixturenames):
            item.add_marker("processes")


def _names_that_start_processes(namespace: dict[str, Any]) -> set[str]:
    found = {
        name
        for name, value in namespace.items()
        if getattr(value, "__module__", None) in _STARTERS
        or (isinstance(value, ModuleType) and value.__name__ in _STARTERS)
    }
    own = {name: _names(value) for name, value in namespace.items() if isinstance(value, FunctionType)}
    while more := {name for name, used in own.items() if used & found} - found:
        found |= more
    return found


def _names(function: Any) -> set[str]:
    """All names that a function's code uses."""
    found: set[str] = set()
    pending = [getattr(getattr(function, "__wrapped__", function), "__code__", None)]
    while pending:
        code = pending.pop()
        if isinstance(code, CodeType):
            found.update(code.co_names)
            pending.extend(code.co_consts)
    return found
