"""A main thread that computes while its pipeline has failed is interrupted in the call, and never after it."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from penstock.engine.failure.cause import Cause
from penstock.engine.failure.watch import PipelineStopped, Watch

CAUSE = Cause(3, "Boom", "on purpose")


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, as in the foreground."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def watch() -> Iterator[Watch]:
    """A watch without its thread: the tests do its work."""
    watch = Watch(dist.HashStore(), "prefix", (0,), 0)
    watch._stopping.set()
    watch._thread.join()
    yield watch
    watch.stop()


def interrupt(watch: Watch, after: float) -> threading.Thread:
    def run() -> None:
        time.sleep(after)
        watch.cause = CAUSE
        watch._interrupt()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_interrupt_ends_a_sleep_in_a_call(watch: Watch) -> None:
    thread = interrupt(watch, 0.1)
    start = time.monotonic()
    with pytest.raises(PipelineStopped) as caught, watch:
        time.sleep(60)
    thread.join()
    assert caught.value.cause is CAUSE
    assert time.monotonic() - start < 30


def test_a_program_with_its_own_handler_is_not_interrupted(watch: Watch) -> None:
    before, seen = signal.getsignal(signal.SIGINT), []
    signal.signal(signal.SIGINT, lambda *args: seen.append(args))
    try:
        thread = interrupt(watch, 0.0)
        with pytest.raises(PipelineStopped), watch:  # at the end of the call
            time.sleep(0.3)
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert not seen
    assert not watch.interrupted


def test_a_call_that_begins_after_the_failure_ends_at_once(watch: Watch) -> None:
    watch.cause = CAUSE
    with pytest.raises(PipelineStopped), watch:
        raise AssertionError("not reached")


def test_ctrl_c_of_the_user_is_raised(watch: Watch) -> None:
    with pytest.raises(KeyboardInterrupt), watch:
        raise KeyboardInterrupt


@pytest.mark.slow
def test_no_interrupt_after_the_call(watch: Watch) -> None:
    """Calls of some milliseconds, each interrupted some milliseconds after its start, before or after its end."""
    chance = random.Random(0)
    stopped = 0
    for _ in range(100):
        watch.interrupted, watch.cause = False, None
        thread = interrupt(watch, chance.random() * 0.004)
        end = time.perf_counter() + chance.random() * 0.004
        try:
            with watch:
                while time.perf_counter() < end:
                    time.sleep(0)
        except PipelineStopped:
            stopped += 1
        except KeyboardInterrupt:  # may arrive while the call is left
            assert watch.interrupted
            watch.status.call_depth = 0
            stopped += 1
        thread.join()
        time.sleep(0.0005)  # for a late one to arrive
    assert 0 < stopped < 100
