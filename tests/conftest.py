"""For all tests, and for the programs that they start."""

from __future__ import annotations

import gc
import os

import pytest

# torch looks up the name of every process that connects to its store. Where names are not known, that takes seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """An operation is computed by the thread that asks for it.

    Else each of a pipeline's threads has threads of its own, which do not sleep while they wait for the next operation:
    with two of them, a small step takes ten times the time of a core.
    """
    import torch

    torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Modules and tests are no garbage: they are not looked through again and again."""
    gc.freeze()
