"""TorchScript layers in stages of every front end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps
from tests.support.models import assert_same, batch, gradients

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


def scripted(layer: nn.Module) -> nn.Module:
    made: nn.Module = torch.jit.script(layer)  # type: ignore[no-untyped-call]
    return made


class BlockModel(nn.Module):
    def __init__(self, made: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(made(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5))) for _ in range(3))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def layers(made: Callable[[nn.Module], nn.Module]) -> nn.Module:
    model = BlockModel(made)
    return nn.Sequential(*model.blocks, model.head)


FRONT_ENDS: dict[str, tuple[Callable[[Any], nn.Module], dict[str, Any]]] = {
    "sequential": (layers, {"stages": 3}),
    "traced": (BlockModel, {"stages": 3}),
    "cuts": (BlockModel, {"cuts": ["blocks.1", "head"]}),
    "blocks": (BlockModel, {"blocks": "blocks", "stages": 3}),
}


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_scripted_layers_match_eager(front_end: str, schedule: str, recompute: str) -> None:
    build, options = FRONT_ENDS[front_end]
    torch.manual_seed(0)
    model, plain = build(scripted), build(lambda layer: layer)
    plain.load_state_dict(model.state_dict())
    with ps.Pipeline(ps.split(model, **options), F.mse_loss, schedule=schedule, recompute=recompute) as pipe:
        torch.manual_seed(1)
        result = pipe.step(batch(), batch(seed=5))
    torch.manual_seed(1)
    loss = F.mse_loss(plain(batch()), batch(seed=5))
    loss.backward()
    assert_same(result.loss, loss.detach())
    assert_same(gradients(model), gradients(plain))
