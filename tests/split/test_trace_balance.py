"""A recorded model is divided as evenly as its layers allow."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import penstock as ps

WIDTH = 8


def check(model: nn.Module, stages: int, x: Tensor) -> None:
    """No stage has twice its even share of the parameters, and a step equals the plain model's."""
    plain = copy.deepcopy(model)
    plan = ps.split(model, stages=stages, sample=x, balance="parameters")
    sizes = [stage.parameters for stage in plan.stages]
    assert max(sizes) < 2 * sum(sizes) / stages, sizes
    for recompute in ("never", "always"):
        model.zero_grad()
        plain.zero_grad()
        pipe = ps.Pipeline(plan, lambda output: output.square().mean(), microbatches=2, recompute=recompute)
        loss = pipe.step(x).loss
        expected = plain(x).square().mean()
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.act = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.linear(x)))  # type: ignore[no-any-return]


class Skips(nn.Module):
    """A U-Net: the last layer uses the value of the first, which an activation has changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.act = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU(inplace=True)
        self.middle, self.last = nn.ModuleList(Block() for _ in range(6)), Block()

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.act(self.norm(self.first(x)))
        for block in self.middle:
            x = block(x) + x
        return self.last(x + first)  # type: ignore[no-any-return]


class Residual(nn.Module):
    """A ResNet: each sum is changed in place, and is used twice by the next block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = block(x)
            y += x
            x = self.act(y)
        return x


@pytest.mark.parametrize("kind", [Skips, Residual])
def test_a_value_that_was_changed_in_place_may_be_used_in_later_stages(kind: type[nn.Module]) -> None:
    """All layers up to the last use of such a value were one layer: 98 % of monai's BasicUNet."""
    torch.manual_seed(0)
    check(kind(), 4, torch.randn(4, WIDTH))


def test_changes_in_place_that_overlap_are_one_layer() -> None:
    class Overlapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

        def forward(self, x: Tensor) -> Tensor:
            a = self.layers[0](x)
            b = self.layers[1](x)
            c = self.layers[2](x)
            b += c  # b is changed first, and a, which was made before it, after c
            d = self.layers[3](x)
            a += d
            b *= 2
            for layer in self.layers[4:]:
                x = layer(x + b)
            return x + a

    torch.manual_seed(0)
    model = Overlapping()
    x = torch.randn(4, WIDTH)
    plan = ps.split(model, stages=4, sample=x, balance="parameters")
    layers = [layer for stage in plan.stages for layer in stage.layers]
    assert layers == ["layers.0", "layers.4", "layers.5", "layers.6", "layers.7"]
    assert plan.check(x)


class Named(nn.ModuleDict):
    """A container with a forward of its own, as those of timm and speechbrain."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.values():
            x = layer(x)
        return x


class Listed(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


@pytest.mark.parametrize("kind", [Named, Listed])
def test_a_container_with_a_forward_is_divided(kind: type[nn.Module]) -> None:
    """It stayed whole, because lists of modules have no forward: 84 % of a Linknet's parameters in one stage."""

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            blocks = [Block() for _ in range(8)]
            self.body = Named({f"b{i}": block for i, block in enumerate(blocks)}) if kind is Named else Listed(blocks)
            self.head = nn.Linear(WIDTH, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    check(Wrapped(), 4, torch.randn(4, WIDTH))


def test_buffers_do_not_keep_heavy_modules_whole() -> None:
    """Stages are balanced by parameters, and a table of positions outweighed all of speechbrain's encoder."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.randn(5000, WIDTH))
            self.table: Tensor

        def forward(self, x: Tensor) -> Tensor:
            return x + self.table[0]

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(8))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions, self.encoder = Positions(), Encoder()
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.encoder(self.positions(x))))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    check(Model(), 4, torch.randn(4, WIDTH))
