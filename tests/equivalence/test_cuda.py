"""The same equality on a GPU: several ranks on one device, and ranks on GPU and CPU in turn."""

from __future__ import annotations

import pytest
import torch

from tests.equivalence.check import check_step
from tests.equivalence.models import TRAINING, Case, stages_for

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

LAYERS = ("relu_", "tuple_edge", "twice", "dict_edge", "scale", "convs", "frozen", "layer_norm", "lookup", "tanh")


@pytest.mark.parametrize("devices", [("cuda:0",), ("cuda:0", "cpu")], ids=["one GPU", "GPU and CPU"])
@pytest.mark.parametrize("schedule", TRAINING)
def test_every_schedule(schedule: str, devices: tuple[str, ...]) -> None:
    for ranks, microbatches, batch in [(2, 4, 10), (4, 8, 13), (3, 5, 3)]:
        stages = stages_for(schedule, ranks)
        # One parameter in stages on different devices is not possible, so nothing is repeated there.
        case = Case(LAYERS, len(devices) == 1, 3, schedule, stages, microbatches, batch, "ignore")
        check_step(case, devices=devices)
