"""Weights that live on the host, with the CPU in the part of both sides and copies as late as they may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.engine.offload.weights import HostWeights, PrefetchStep
from tests.support.copies import LateCopies

__all__ = ["LateWeights", "late_weights", "weights_everywhere"]


class LateWeights(HostWeights):
    """Knows how many bytes of weights were on the device at a time, at most. Memory that is gone is really gone."""

    def __init__(self, modules: Mapping[int, nn.Module], devices: Sequence[torch.device]) -> None:
        self.late = LateCopies()
        self.most = 0
        super().__init__(modules, devices, lambda device: self.late)

    def _stop(self, own: Sequence[object], stop: PrefetchStep) -> None:
        super()._stop(own, stop)  # type: ignore[arg-type]
        self.most = max(self.most, self.bytes_there())

    def bytes_there(self) -> int:
        homes = [home for cargo in self._cargo.values() for home in cargo._homes]
        return sum(home.there.untyped_storage().nbytes() for home in homes)

    def bytes_of(self, stage: int) -> int:
        return sum(parameter.nbytes for parameter in self.modules[stage].parameters())


def late_weights(monkeypatch: pytest.MonkeyPatch) -> list[LateWeights]:
    """From now on pipelines with ``Offload(weights=True)`` have such weights, which are in the list once made."""
    made: list[LateWeights] = []

    def make(modules: Mapping[int, nn.Module], devices: Sequence[torch.device]) -> LateWeights:
        made.append(LateWeights(modules, devices))
        return made[-1]

    monkeypatch.setattr("penstock.train.build.host_weights", make)
    return made


def weights_everywhere(monkeypatch: pytest.MonkeyPatch) -> list[LateWeights]:
    """Every pipeline keeps its weights on the host, and any optimizer may step: here the host does it as well."""
    before = ps.Pipeline.__init__

    def init(self: ps.Pipeline, *args: Any, **options: Any) -> None:
        before(self, *args, **{**options, "offload": ps.Offload(activations=False, weights=True)})
        assert self._watch is not None
        self._watch.remove()

    monkeypatch.setattr(ps.Pipeline, "__init__", init)
    return late_weights(monkeypatch)
