"""Links between ranks and between threads: measured over the pipeline's own channels."""

from __future__ import annotations

import math
import os
import time
from typing import Any
from unittest import mock

import pytest
import torch

import penstock as ps
from penstock.profile import links
from penstock.profile.costs import Link
from penstock.profile.links import ROUNDS, Links, fit_line, host_time_per_message, local_link, measure_links
from tests.support.models import penstock_threads
from tests.support.ranks import RankExited, Ranks, run_ranks


def test_latency_is_what_a_small_value_takes_and_bandwidth_what_the_large_one_adds() -> None:
    assert fit_line(0.5, 2.5, 0, 1000) == (0.5, 500.0)
    assert fit_line(0.5, 0.4, 0, 1000) == (0.5, math.inf)  # noise
    assert Link(0.5, 500.0).seconds(1000) == 2.5
    assert Link(0.5, 500.0, 0.25, 100.0).host_seconds(1000) == 10.25
    assert fit_line(2.0, 3.0, 500, 1000) == (1.0, 500.0)  # through both, not through the smaller one
    assert fit_line(0.1, 3.1, 500, 1500) == (0.0, pytest.approx(1000 / 3))  # and never below zero


class Costly:
    """An endpoint that takes some of a rank's own time for each of a number of bytes, and waits for nobody."""

    device = torch.device("cpu")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.sent: list[int] = []

    def buffer_factories(self, metas: Any) -> Any:
        return metas

    def recv(self, buffers: Any) -> list[Any]:
        return []

    def send(self, values: list[torch.Tensor]) -> list[Any]:
        self.sent.append(values[0].numel())
        until = time.thread_time() + self.seconds * values[0].numel()
        while time.thread_time() < until:
            pass
        time.sleep(0.001)  # is nobody's time
        return []

    def wait(self, works: list[Any]) -> None: ...

    def wait_tensors(self, works: list[Any]) -> list[torch.Tensor]:
        return []


@pytest.mark.parametrize("turn", [0, 1])
def test_a_value_takes_the_time_on_the_cores_that_it_adds(turn: int) -> None:
    endpoint: Any = Costly(1e-5)
    threads = torch.get_num_threads()
    found = host_time_per_message(endpoint, endpoint, 200, 0.0, turn)
    assert endpoint.sent.count(200) == endpoint.sent.count(0) == ROUNDS
    assert 0.7 * 200e-5 / 2 < found < 1.8 * 200e-5 / 2  # of two ends, each has half; other threads here are few
    assert torch.get_num_threads() == threads


class Air:
    """An endpoint that is not there: all arrives at once."""

    device = torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        return lambda *_: []


def test_a_way_there_is_half_of_a_way_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter(range(10_000))  # a second for each look at the clock, two of them around each round trip
    monkeypatch.setattr(links, "perf_counter", lambda: float(next(looks)))
    air: Any = Air()
    assert links._ping_pong(air, air, True, 100, 3) == (0.5, 0.5)
    assert local_link("cpu", "cpu", repeats=3) == Link(0.5)


def test_the_worst_of_several() -> None:
    both = Links({(0, 1): Link(1.0, 50.0, 3.0, 4.0), (1, 2): Link(2.0, 100.0, 1.0, 2.0)})
    assert both.worst == Link(2.0, 50.0, 3.0, 2.0)
    assert Links({}).worst == Link()


def ring(rank: int) -> Any:
    found = measure_links(ps.Mesh(pipe=3), size=1 << 16, repeats=3)
    return dict(found.pairs), penstock_threads()


def test_ranks_measure_all_links_of_a_ring_and_leave_nothing_behind(three: Ranks) -> None:
    found = three.check(ring)
    pairs = [pairs for pairs, _ in found]
    assert pairs[0] == pairs[1] == pairs[2]
    assert list(pairs[0]) == [(0, 1), (1, 2), (2, 0)]
    assert all(link.latency > 0 and link.bandwidth > 0 for link in pairs[0].values())
    assert len({(link.host, link.host_bandwidth) for link in pairs[0].values()}) == 1  # of all ranks at once
    assert all(link.host_seconds(1 << 16) > 0 for link in pairs[0].values())
    assert [threads for _, threads in found] == [set(), set(), set()]


def quick_ring(rank: int) -> Any:
    with mock.patch.object(links, "ROUNDS", 4):
        return ring(rank)


def alone(rank: int) -> Any:
    return dict(measure_links(ps.Mesh(data=3, pipe=1)).pairs)


def disagreeing(rank: int) -> Any:
    measure_links(ps.Mesh(pipe=3), size=100 + rank)


def test_what_cannot_be_measured(three: Ranks) -> None:
    assert three.check(alone) == [{}, {}, {}]
    for error in three.run(disagreeing):
        assert isinstance(error, ps.PlanError | ps.PipelineError)
        assert "100 bytes" in str(error)
    three.check(quick_ring)  # and the ranks can go on
    with pytest.raises(ps.PlanError, match="repeats=0 must be a whole number"):
        local_link("cpu", "cpu", repeats=0)
    with pytest.raises(ps.PlanError, match=r"a ps\.Mesh, got int"):
        measure_links(3)  # type: ignore[arg-type]


def killed(rank: int) -> Any:
    if rank == 1:
        mock.patch.object(links, "_ping_pong", side_effect=lambda *_: os._exit(3)).start()
    measure_links(ps.Mesh(pipe=3), size=1 << 16)


def test_a_rank_that_is_gone_is_an_error_of_the_others() -> None:
    first, second, third = run_ranks(killed, 3, timeout=50)
    assert isinstance(second, RankExited)
    for error in (first, third):
        assert isinstance(error, ps.PipelineError)
        assert "rank 1" in str(error)


def test_threads_that_share_a_device_copy_nothing() -> None:
    link = local_link("cpu", "cpu")
    assert 0 < link.latency < 1
    assert link.bandwidth == math.inf


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("src", "dst"), [("cpu", "cuda:0"), ("cuda:0", "cpu")])
def test_host_and_device_copy(src: str, dst: str) -> None:
    link = local_link(src, dst, size=64 << 20)
    assert 0 < link.latency < 1
    assert 1e8 < link.bandwidth < 1e13


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_devices_copy() -> None:
    assert 1e8 < local_link("cuda:0", "cuda:1", size=64 << 20).bandwidth < 1e13
