"""Run the documents' programs on the CPU, and on a GPU if there is one."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device_type(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The type of device that a program finds; for ``cpu``, CUDA is hidden."""
    kind: str = request.param
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    if kind == "cpu":
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return kind
