"""PopTorch's operators that direct a compiler are identities here; names that the facade lacks have a reason."""

from __future__ import annotations

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


@pytest.mark.parametrize("name", ["for_loop", "ctc_beam_search_decoder", "CPU", "IPUContext", "no_such_name"])
def test_missing_names_have_a_reason(name: str) -> None:
    with pytest.raises(AttributeError, match=f"poptorch.{name}: it directs an IPU or its compiler, see the table in"):
        getattr(poptorch, name)
    assert not hasattr(poptorch, name)
