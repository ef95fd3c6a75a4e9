"""The link between processes of a run that is to come."""

from __future__ import annotations

import os
from math import inf

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.profile.costs import Link
from penstock.profile.links import process_link
from tests.support.fork_python import fork_python


@pytest.mark.slow
def test_messages_between_processes_take_time_and_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", fork_python())  # which has imported torch
    link = process_link("cpu", 2)
    assert 0 < link.latency < 1
    assert 0 < link.bandwidth < inf


def test_what_cannot_be_measured_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", os.devnull)
    with pytest.raises(ps.PlanError, match=r"the link between processes could not be measured: .* Give link="):
        process_link("cpu", 2)


# Replicas are processes, and their plan was made with the link between threads, over which sums of gradients of any
# size took some microseconds.
def test_a_plan_for_replicas_has_the_link_between_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def slow(device: str, ranks: int) -> Link:
        asked.append((device, ranks))
        return Link(latency=1e9)

    monkeypatch.setattr("penstock.profile.planner.plan.process_link", slow)
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), torch.randn(4, 8)
    planned = ps.plan(model, x, devices=2, replicas=True, seconds=0.1, measure_seconds=0.1)
    assert planned.seconds > 1e9
    assert asked == [(planned.devices[0], 2)] if planned.devices else False
    fast = ps.plan(model, x, devices=2, replicas=True, link=Link(), seconds=0.1, measure_seconds=0.1)
    assert fast.seconds < 1
    assert len(asked) == 1
