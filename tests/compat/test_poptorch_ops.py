"""PopTorch's operators that direct a compiler are identities here; names that the facade lacks have a reason."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock.compat.poptorch as poptorch
from tests.compat.poptorch_models import options
from tests.compat.poptorch_models import plainly as plainly


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        with poptorch.Block("A"), poptorch.NameScope("encoder"):
            x = poptorch.ipu_print_tensor(poptorch.nop(self.first(x)), "first", print_gradient=False)
        with poptorch.Block("B"):
            x = poptorch.set_available_memory(x, 0.3)
            mode = poptorch.MatMulSerializationMode.OutputChannels
            return self.last(poptorch.serializedMatMul(x, self.first.weight, mode, factor=2))


def test_operators_without_an_effect() -> None:
    model, x = Net(), torch.randn(6, 4)
    strategy = poptorch.PipelinedExecution("A", "B")
    expected = model.last(model.first(x) @ model.first.weight)
    torch.testing.assert_close(poptorch.inferenceModel(model, options(strategy, iterations=3))(x), expected.detach())
    torch.testing.assert_close(model(x), expected)


def test_missing_names_have_a_remedy() -> None:
    """Of each name in the table of docs/migrating.md. All of them once were said to direct an IPU, autocast too."""
    text = (Path(__file__).parents[2] / "docs/migrating.md").read_text()
    listed = re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", text, re.MULTILINE)))
    refused = {name: remedy for names, remedy in poptorch.REFUSED.items() for name in names.split()}
    assert {name for name in refused if "Phase" not in name} <= set(listed)
    for name, remedy in refused.items():
        with pytest.raises(AttributeError, match=re.escape(f"poptorch.{name} is not available: {remedy}")):
            getattr(poptorch, name)
    with pytest.raises(AttributeError, match=r"use torch\.autocast"):
        poptorch.autocast  # noqa: B018
    with pytest.raises(AttributeError, match=r"no_such_name is not available: see docs/migrating\.md"):
        poptorch.no_such_name  # noqa: B018
    assert not hasattr(poptorch, "for_loop")
