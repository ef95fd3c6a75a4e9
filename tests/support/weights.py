"""Host weights with the CPU as host and device, and with copies that run as late as possible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.engine.offload.weights import HostWeights, PrefetchStep
from tests.support.copies import LateCopies

__all__ = ["LateWeights", "offload_weights_everywhere", "use_late_weights"]


class LateWeights(HostWeights):
    """Records the largest number of bytes of weights on the device at a time."""

    def __init__(self, modules: Mapping[int, nn.Module], devices: Sequence[torch.device]) -> None:
        self.late = LateCopies()
        self.most = 0
        super().__init__(modules, devices, dict.fromkeys(devices, self.late))

    def _transfer(self, own: Sequence[object], step: PrefetchStep) -> None:
        super()._transfer(own, step)  # type: ignore[arg-type]
        self.most = max(self.most, self.bytes_on_device())

    def bytes_on_device(self) -> int:
        on_device = [tensor for params in self._params.values() for _, tensor in params.hosted.values()]
        return sum(tensor.untyped_storage().nbytes() for tensor in on_device)

    def bytes_of(self, stage: int) -> int:
        return sum(parameter.nbytes for parameter in self.modules[stage].parameters())


def use_late_weights(monkeypatch: pytest.MonkeyPatch) -> list[LateWeights]:
    """Let new pipelines with ``Offload(weights=True)`` use LateWeights, which are appended to the returned list."""
    made: list[LateWeights] = []

    def make(modules: Mapping[int, nn.Module], devices: Sequence[torch.device]) -> LateWeights:
        made.append(LateWeights(modules, devices))
        return made[-1]

    monkeypatch.setattr("penstock.train.build.host_weights", make)
    return made


def offload_weights_everywhere(monkeypatch: pytest.MonkeyPatch) -> list[LateWeights]:
    """Let every pipeline keep its weights on the host and accept any optimizer."""
    before = ps.Pipeline.__init__

    def init(self: ps.Pipeline, *args: Any, **options: Any) -> None:
        before(self, *args, **{**options, "offload": ps.Offload(activations=False, weights=True)})
        assert self._offload_check is not None
        self._offload_check.remove()

    monkeypatch.setattr(ps.Pipeline, "__init__", init)
    return use_late_weights(monkeypatch)
