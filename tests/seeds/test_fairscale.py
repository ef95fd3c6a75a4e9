"""The program of fairscale's tutorial on pipelines, with its import lines changed."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim

from penstock.compat import fairscale
from tests.support.models import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:.* partitions share .* GPU")


class ToyModel(nn.Module):
    def __init__(self):
        super(ToyModel, self).__init__()  # noqa: UP008
        self.net1 = torch.nn.Linear(10, 10)
        self.relu = torch.nn.ReLU()
        self.net2 = torch.nn.Linear(10, 5)

    def forward(self, x):
        x = self.relu(self.net1(x))
        return self.net2(x)


def test_toy_model(device_type: str) -> None:
    torch.manual_seed(0)
    toy = ToyModel()

    model = nn.Sequential(
        torch.nn.Linear(10, 10),
        torch.nn.ReLU(),
        torch.nn.Linear(10, 5),
    )

    for name, number in (("net1", 0), ("net2", 2)):
        getattr(toy, name).load_state_dict(model[number].state_dict())
    plain = copy.deepcopy(toy)

    model = fairscale.nn.Pipe(model, balance=[2, 1])

    assert [device.type for device in model.devices] == [device_type] * 2

    optimizer = optim.SGD(model.parameters(), lr=0.001)
    loss_fn = F.nll_loss

    optimizer.zero_grad()
    target = torch.randint(0, 2, size=(20, 1)).squeeze()
    data = torch.randn(20, 10)

    device = model.devices[0]
    ## outputs and target need to be on the same device
    # forward step
    outputs = model(data.to(device))
    # compute loss
    loss = loss_fn(outputs.to(device), target.to(device))

    # backward + optimize
    loss.backward()
    optimizer.step()

    theirs = optim.SGD(plain.parameters(), lr=0.001)
    expected = loss_fn(plain(data), target)
    expected.backward()
    theirs.step()
    assert_same(loss.detach().cpu(), expected.detach())
    assert_same(outputs.detach().cpu(), toy(data).detach())
    assert_same([p.detach().cpu() for p in model.parameters()], [p.detach() for p in plain.parameters()])
