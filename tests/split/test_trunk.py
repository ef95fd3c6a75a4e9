"""``blocks=``: any model that threads a hidden state through a list of blocks, in stages that equal the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from penstock.split.plan import run_stages
from tests.split.trunk_models import WIDTH, Block, Trunked, Usual, assert_staged, cut, hidden, tokens, tril

pytestmark = pytest.mark.slow

SIZES = [(4,), (2, 2), (1, 3), (3, 1), (1, 2, 1), (1, 1, 1, 1)]
each_cut = pytest.mark.parametrize("sizes", SIZES, ids=str)


# ── equality with the whole model ────────────────────────────────────────────────────────────────────────────────


@each_cut
@pytest.mark.parametrize("training", [True, False])
def test_stages_equal_the_whole_model(sizes: tuple[int, ...], training: bool) -> None:
    model = Usual().train(training)
    assert_staged(model, cut(model, sizes), tokens(), tril())


@each_cut
def test_keyword_arguments_of_the_model_and_of_the_blocks(sizes: tuple[int, ...]) -> None:
    class Keyword(Trunked):
        def forward(self, ids: Tensor, *, mask: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
            x = self.embed(ids) * scale
            for i in range(len(self.blocks)):
                x = self.blocks[i](x, bias=None, mask=mask)
            return {"logits": self.head(x), "pooled": x.mean(1)}

    model = Keyword()
    assert_staged(model, cut(model, sizes), tokens(), mask=tril(), scale=0.5)


@each_cut
def test_blocks_may_return_tuples_whose_gradients_come_back(sizes: tuple[int, ...]) -> None:
    class Paired(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.bias = Block(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, None]:
            bias = self.bias(x) if bias is None else bias
            return self.block(x, bias=bias), bias, None

    class Tuples(Trunked):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Paired() for _ in range(4))

        def forward(self, ids: Tensor) -> Tensor:
            bias = None
            x = self.drop(self.embed(ids))
            for block in self.blocks:
                x, bias, _ = block(x, bias)
            return self.head(x) + bias.sum()

    model = Tuples()
    assert_staged(model, cut(model, sizes), tokens())


@each_cut
def test_a_sequential_of_blocks_is_a_trunk(sizes: tuple[int, ...]) -> None:
    class Piped(Trunked):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*self.blocks)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.blocks(self.embed(ids) + self.pos))

    model = Piped()
    assert_staged(model, cut(model, sizes), tokens())


@each_cut
def test_sequentials_inside_a_sequential(sizes: tuple[int, ...]) -> None:
    parts = Trunked()
    model = nn.Sequential(parts.embed, parts.drop, nn.Sequential(*parts.blocks), parts.norm, parts.head)
    assert_staged(model, cut(model, sizes, "2"), tokens())


@each_cut
def test_a_model_whose_source_cannot_be_read(sizes: tuple[int, ...]) -> None:
    text = """
class Made(Trunked):
    def forward(self, ids):
        x = self.embed(ids) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.pos.sum()
"""
    space = {"Trunked": Trunked}
    exec(text, space)  # as in a session without files
    model: nn.Module = space["Made"]()
    assert_staged(model, cut(model, sizes), tokens())


@each_cut
def test_compiled_blocks(sizes: tuple[int, ...]) -> None:
    model = Usual().eval()
    for block in model.blocks:
        block.compile(backend="eager")
    plan = cut(model, sizes)
    with torch.no_grad():
        assert torch.equal(run_stages(plan, (tokens(), tril()), {}), model(tokens(), tril()))


@each_cut
def test_a_model_without_embedding_sends_its_input_once(sizes: tuple[int, ...]) -> None:
    class Bare(Trunked):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x, mask)
            return x

    model = Bare()
    plan = cut(model, sizes)
    assert_staged(model, plan, hidden(), tril())
    if len(sizes) > 1:
        modules = [plan.stage_module(s) for s in range(plan.num_stages)]
        sent = modules[0]({"x": hidden(), "mask": tril()})
        arguments = sent[1] if len(sizes) == 2 else sent[0][1]
        assert not isinstance(arguments["x"], Tensor)  # its shape is enough
        assert torch.equal(arguments["mask"], tril())


@each_cut
def test_a_trunk_inside_containers_that_have_no_forward(sizes: tuple[int, ...]) -> None:
    class Boxed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            parts = Trunked()
            self.box = nn.ModuleDict({"wte": parts.embed, "drop": parts.drop, "h": parts.blocks, "ln": parts.norm})
            self.head = nn.Linear(WIDTH, 16, bias=False)
            self.box.wte.weight = self.head.weight

        def forward(self, ids: Tensor) -> Tensor:
            x = self.box.drop(self.box["wte"](ids))
            for block in self.box.h:
                x = block(x)
            return self.head(self.box["ln"](x))

    model = Boxed()
    plan = cut(model, sizes, "box.h")
    assert_staged(model, plan, tokens())
    ties = [(set(tie.names), tie.stages) for tie in plan.ties]
    assert ties == ([({"box.wte.weight", "head.weight"}, (0, len(sizes) - 1))] if len(sizes) > 1 else [])


@each_cut
def test_an_embedding_that_is_used_again_as_the_head_is_a_tie(sizes: tuple[int, ...]) -> None:
    class Reused(Trunked):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.drop(self.embed(ids))
            for block in self.blocks:
                x = block(x)
            return F.linear(x, self.embed.weight)

    model = Reused()
    plan = cut(model, sizes)
    assert_staged(model, plan, tokens())
    assert [tie.names for tie in plan.ties] == ([("embed.weight",)] if len(sizes) > 1 else [])
    assert "embed.weight" in dict(plan.stage_module(len(sizes) - 1).named_parameters())


@each_cut
def test_a_parameter_that_every_block_is_given_is_in_every_stage(sizes: tuple[int, ...]) -> None:
    class Shared(Trunked):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.randn(WIDTH))

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x, bias=self.bias)
            return self.head(x)

    model = Shared()
    plan = cut(model, sizes)
    assert_staged(model, plan, tokens())
    assert all("bias" in dict(plan.stage_module(s).named_parameters()) for s in range(len(sizes)))


@each_cut
@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_that_every_block_is_given(sizes: tuple[int, ...], persistent: bool) -> None:
    class Masked(Trunked):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", tril(), persistent)

        def forward(self, ids: Tensor) -> Tensor:
            x, mask = self.embed(ids), self.mask[: ids.shape[1]]
            for block in self.blocks:
                x = block(x, mask)
            return self.head(x)

    model = Masked()
    plan = cut(model, sizes)
    assert_staged(model, plan, tokens())
    for s in range(len(sizes)):
        assert ("mask" in plan.stage_module(s).state_dict()) == persistent


@each_cut
def test_parts_go_where_the_forward_uses_them_whatever_their_order(sizes: tuple[int, ...]) -> None:
    class Upside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(WIDTH, 16)
            self.gain = nn.Parameter(torch.ones(16))
            self.blocks = nn.ModuleList(Block() for _ in range(4))
            self.embed = nn.Embedding(16, WIDTH)

        def start(self, ids: Tensor) -> Tensor:
            return self.embed(ids)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.start(ids)
            for block in self.blocks:
                x = block(x)
            return self.end(x)

        def end(self, x: Tensor) -> Tensor:
            return self.head(x) * self.gain

    model = Upside()
    plan = cut(model, sizes)
    assert_staged(model, plan, tokens())
    last = dict(plan.stage_module(len(sizes) - 1).named_parameters())
    assert {"head.weight", "gain"} <= set(last)
    assert ("embed.weight" in last) == (len(sizes) == 1)


@each_cut
def test_parts_may_give_other_shapes_than_the_blocks(sizes: tuple[int, ...]) -> None:
    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Conv2d(3, WIDTH, 4, 4)

        def forward(self, image: Tensor) -> tuple[Tensor, tuple[int, int]]:
            x = self.project(image)
            return x.flatten(2).transpose(1, 2), (x.shape[2], x.shape[3])

    class Vision(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches, self.token = Patches(), nn.Parameter(torch.randn(1, 1, WIDTH))
            self.pos = nn.Parameter(torch.randn(1, 5, WIDTH))
            self.blocks = nn.ModuleList(Block() for _ in range(4))
            self.head = nn.Linear(WIDTH, 3)

        def forward(self, image: Tensor) -> Tensor:
            x, (height, width) = self.patches(image)
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.pos
            mask = torch.eye(x.shape[1])
            for block in self.blocks:
                x = block(x, mask)
            return self.head(x[:, 0]) / (height * width)

    model = Vision()
    assert_staged(model, cut(model, sizes), torch.randn(2, 3, 8, 8))


@each_cut
def test_blocks_may_change_the_shape(sizes: tuple[int, ...]) -> None:
    class Halves(Block):
        def forward(self, x: Tensor, *_: Any) -> Tensor:
            return super().forward(x)[:, ::2]

    class Narrows(Trunked):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Halves(), Block(), Halves(), Block()])

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids) + self.pos
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    model = Narrows()
    assert_staged(model, cut(model, sizes), tokens())


@each_cut
def test_random_numbers_are_drawn_where_the_whole_model_draws_them(sizes: tuple[int, ...]) -> None:
    class Noisy(Trunked):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            x = x + torch.randn(x.shape) + 0.1 * torch.rand_like(x)
            x = F.dropout(x, 0.3, self.training)
            x = F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
            for block in self.blocks:
                x = F.dropout(block(x), 0.1, self.training)
            return self.head(x + torch.randn_like(x))

    model = Noisy()
    assert_staged(model, cut(model, sizes), tokens())


@each_cut
def test_writing_into_the_hidden_state_does_not_spoil_what_was_received(sizes: tuple[int, ...]) -> None:
    class Inplace(Trunked):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            x *= 2.0
            x += self.pos
            x[:, 0] = 0.0
            for block in self.blocks:
                x = block(x)
                x += 1.0
            return self.head(x)

    model = Inplace()
    assert_staged(model, cut(model, sizes), tokens())


@each_cut
def test_hooks_on_the_hidden_state(sizes: tuple[int, ...]) -> None:
    class Hooked(Trunked):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            x.register_hook(lambda grad: grad * 2)
            for block in self.blocks:
                x = block(x)
            x.register_hook(lambda grad: grad * 3)
            return self.head(x)

    model = Hooked()
    assert_staged(model, cut(model, sizes), tokens())


@each_cut
def test_a_checkpoint_around_each_block(sizes: tuple[int, ...]) -> None:
    class Saving(Trunked):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.drop(self.embed(ids))
            for block in self.blocks:
                x = checkpoint(block, x, None, use_reentrant=False)
            return self.head(x)

    model = Saving()
    for block in model.blocks:
        block.norm.eval()  # a BatchNorm would count a recomputed batch twice
    assert_staged(model, cut(model, sizes), tokens())


@each_cut
def test_what_the_forward_remembers_is_remembered_once(sizes: tuple[int, ...]) -> None:
    class Counting(Trunked):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))
            self.register_buffer("mean", torch.zeros(WIDTH))
            self.calls = self.ends = 0

        def forward(self, ids: Tensor) -> Tensor:
            self.calls += 1
            self.steps = self.steps + 1
            x = self.embed(ids)
            self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
            for block in self.blocks:
                x = block(x)
            self.ends += 1
            return self.head(x)

    model = Counting()
    plan = cut(model, sizes)
    modules = [plan.stage_module(s) for s in range(len(sizes))]
    assert_staged(model, plan, tokens(), modules=modules)
    assert (model.calls, model.ends) == (1, 1)
    for module in modules[1:]:  # copies follow what they can
        assert module.get_buffer("steps") == 1
        assert not module.get_buffer("mean").any()


@each_cut
def test_torchs_own_encoder(sizes: tuple[int, ...]) -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(16, WIDTH)
            layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 4, nn.LayerNorm(WIDTH), enable_nested_tensor=False)

        def forward(self, ids: Tensor, padding: Tensor) -> Tensor:
            return self.encoder(self.embed(ids), src_key_padding_mask=padding)

    model = Encoder()
    padding = torch.zeros(3, 6, dtype=torch.bool)
    padding[1, 4:] = True
    assert_staged(model, cut(model, sizes, "encoder.layers"), tokens(), padding)


@each_cut
def test_positional_and_starred_arguments(sizes: tuple[int, ...]) -> None:
    class Starred(Trunked):
        def forward(self, ids: Tensor, /, scale: float, *masks: Tensor, **more: Any) -> Tensor:
            x = self.embed(ids) * scale
            for block in self.blocks:
                x = block(x, sum(masks), **more)
            return x

    model = Starred()
    assert_staged(model, cut(model, sizes), tokens(), 2.0, tril(), tril())
    model.zero_grad()
    assert_staged(model, cut(model, sizes), tokens(), 2.0, tril(), bias=torch.ones(WIDTH))
