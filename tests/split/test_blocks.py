"""``blocks=``: a model with a list of blocks, cut between them, is equal to the plain model."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from penstock.engine.shapes import FakeStage
from penstock.errors import PlanError
from penstock.split.balance import balance_stages
from penstock.split.plan import run_stages
from penstock.split.trace.chain import TraceChain
from penstock.split.trace.front_end import trace_chain
from tests.split.block_models import (
    SIZES,
    TOKENS,
    WIDTH,
    Block,
    BlockModel,
    Masked,
    assert_staged,
    assert_staged_between_blocks,
    chain_of_blocks,
    hidden,
    plan_of_sizes,
    tokens,
    tril,
)
from tests.split.trace_checks import untouched

pytestmark = pytest.mark.slow


# ── equality with the plain model ────────────────────────────────────────────────────────────────────────────────


def test_train_and_eval() -> None:
    for training in (True, False):
        assert_staged_between_blocks(Masked().train(training), tokens(), tril())


def test_keyword_arguments_of_the_model_and_of_the_blocks() -> None:
    class Keyword(BlockModel):
        def forward(self, ids: Tensor, *, mask: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
            x = self.embed(ids) * scale
            for i in range(len(self.blocks)):
                x = self.blocks[i](x, bias=None, mask=mask)
            return {"logits": self.head(x), "pooled": x.mean(1)}

    assert_staged_between_blocks(Keyword(), tokens(), mask=tril(), scale=0.5)


def test_positional_and_starred_arguments() -> None:
    class Starred(BlockModel):
        def forward(self, ids: Tensor, /, scale: float, *masks: Tensor, **more: Any) -> Tensor:
            x = self.embed(ids) * scale
            for block in self.blocks:
                x = block(x, sum(masks), **more)
            return x

    assert_staged_between_blocks(Starred(), tokens(), 2.0, tril(), tril())
    assert_staged_between_blocks(Starred(), tokens(), 2.0, tril(), bias=torch.ones(WIDTH))


def test_blocks_that_return_tuples() -> None:
    class Paired(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.bias = Block(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, None]:
            bias = self.bias(x) if bias is None else bias
            return self.block(x, bias=bias), bias, None

    class Tuples(BlockModel):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Paired() for _ in range(4))

        def forward(self, ids: Tensor) -> Tensor:
            bias = None
            x = self.drop(self.embed(ids))
            for block in self.blocks:
                x, bias, nothing = block(x, bias)
                x = x if nothing is None else x * 2
            return self.head(x) + bias.sum()

    assert_staged_between_blocks(Tuples(), tokens())


def test_blocks_that_return_objects() -> None:
    class Wrapped(Block):
        def forward(self, x: Any, *_: Any) -> Any:
            return SimpleNamespace(x=super().forward(x if isinstance(x, Tensor) else x.x))

    class Wraps(BlockModel):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Wrapped() for _ in range(4))

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x)
            return self.head(x.x)

    assert_staged_between_blocks(Wraps(), tokens())


def test_blocks_that_change_the_shape() -> None:
    class Halves(Block):
        def forward(self, x: Tensor, *_: Any) -> Tensor:
            return super().forward(x)[:, ::2]

    class Narrows(BlockModel):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Halves(), Block(), Halves(), Block()])

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids) + self.pos
            for block in self.blocks:
                x = block(x)
                if x.shape[1] < 4:
                    x = x * 2
            return self.head(x)

    assert_staged_between_blocks(Narrows(), tokens())


def test_blocks_in_a_sequential() -> None:
    class Piped(BlockModel):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*self.blocks)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.blocks(self.embed(ids) + self.pos))

    assert_staged_between_blocks(Piped(), tokens())
    parts = BlockModel()
    model = nn.Sequential(parts.embed, parts.drop, nn.Sequential(*parts.blocks), parts.norm, parts.head)
    assert_staged_between_blocks(model, tokens(), blocks="2")


def test_blocks_of_torchs_encoder() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(TOKENS, WIDTH)
            layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 4, nn.LayerNorm(WIDTH), enable_nested_tensor=False)

        def forward(self, ids: Tensor, padding: Tensor) -> Tensor:
            return self.encoder(self.embed(ids), src_key_padding_mask=padding)

    padding = torch.zeros(3, 6, dtype=torch.bool)
    padding[1, 4:] = True
    assert_staged_between_blocks(Encoder(), tokens(), padding, blocks="encoder.layers")


def test_a_model_without_a_file() -> None:
    text = """
class Made(BlockModel):
    def forward(self, ids):
        x = self.embed(ids) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.pos.sum()
"""
    space: dict[str, Any] = {"BlockModel": BlockModel}
    exec(text, space)  # as in an interactive session
    assert_staged_between_blocks(space["Made"](), tokens())


def test_compiled_blocks_and_a_compiled_forward() -> None:
    model = Masked().eval()
    for block in model.blocks:
        block.compile(backend="eager")
    plan = plan_of_sizes(chain_of_blocks(model, tokens(), tril()), [2, 2])
    with torch.no_grad():
        assert torch.equal(run_stages(plan, (tokens(), tril()), {}), model(tokens(), tril()))
    model = Masked().eval()
    want = model(tokens(), tril())
    model.compile(backend="eager")
    plan = plan_of_sizes(chain_of_blocks(model, tokens(), tril()), [2, 2])
    assert torch.equal(run_stages(plan, (tokens(), tril()), {}), want)


def test_a_forward_set_on_the_object() -> None:
    model = Masked().eval()
    original = model.forward
    want = 2 * model(tokens())
    model.forward = lambda ids: 2 * original(ids)
    plan = plan_of_sizes(chain_of_blocks(model, tokens()), [2, 2])
    assert torch.equal(run_stages(plan, (tokens(),), {}), want)


def test_containers_without_a_forward() -> None:
    class Boxed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            parts = BlockModel()
            self.box = nn.ModuleDict({"wte": parts.embed, "drop": parts.drop, "h": parts.blocks, "ln": parts.norm})
            self.head = nn.Linear(WIDTH, TOKENS, bias=False)
            self.box.wte.weight = self.head.weight

        def forward(self, ids: Tensor) -> Tensor:
            x = self.box.drop(self.box["wte"](ids))
            for block in self.box.h:
                x = block(x)
            return self.head(self.box["ln"](x))

    chain = assert_staged_between_blocks(Boxed(), tokens(), blocks="box.h")
    (tie,) = plan_of_sizes(chain, [1, 2, 1]).ties
    assert (set(tie.names), tie.stages) == ({"box.wte.weight", "head.weight"}, (0, 2))


def test_images() -> None:
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

    assert_staged_between_blocks(Vision(), torch.randn(2, 3, 8, 8))


# ── values that cross stages ─────────────────────────────────────────────────────────────────────────────────────


def test_values_from_before_the_blocks_used_in_every_block_and_after_them() -> None:
    class Conditioned(BlockModel):
        def forward(self, ids: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
            first = x = self.embed(ids)
            condition, mask = self.norm(time), torch.rand(6, 6)
            for block in self.blocks:
                x = block(x, mask, bias=condition) + first
            return self.head(x + first), first

    assert_staged_between_blocks(Conditioned(), tokens(), hidden())


def test_hidden_states_of_every_block() -> None:
    class Collects(BlockModel):
        def forward(self, ids: Tensor) -> Any:
            states = [x := self.embed(ids)]
            for block in self.blocks:
                states.append(x := block(x))
            return OrderedDict(logits=self.head(x), states=tuple(states), mean=torch.stack(states).mean(0))

    assert_staged_between_blocks(Collects(), tokens())


def test_rows_of_a_tensor() -> None:
    class Rows(BlockModel):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            rows = [row for row in x.mean(0)]  # noqa: C416
            for block, row in zip(self.blocks, reversed(rows), strict=False):
                x = block(x, bias=row)
            return self.head(x)

    assert_staged_between_blocks(Rows(), tokens())


def test_edges_are_from_the_producer_to_each_consumer() -> None:
    class Scored(BlockModel):
        def forward(self, ids: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x, mask)
            return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())

    chain = chain_of_blocks(Scored(), tokens(), tril(), tokens(2))
    edges = {(edge.src, edge.dst): edge.values for edge in plan_of_sizes(chain, [1, 1, 1, 1]).edges}
    assert edges == {
        (0, 1): ("mask", "blocks.0"),
        (0, 2): ("mask",),
        (0, 3): ("mask", "targets"),
        (1, 2): ("blocks.1",),
        (2, 3): ("blocks.2",),
    }


def test_an_input_that_one_stage_needs_is_not_sent() -> None:
    class Bare(BlockModel):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x, mask)
            return x

    chain = assert_staged_between_blocks(Bare(), hidden(), tril())
    assert [edge.values for edge in plan_of_sizes(chain, [2, 2]).edges] == [("mask", "blocks.1")]


def test_changes_in_place_between_blocks() -> None:
    class Inplace(BlockModel):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            x *= 2.0
            x += self.pos
            x[:, 0] = 0.0
            for block in self.blocks:
                x = block(x)
                x += 1.0
            return self.head(x)

    assert_staged_between_blocks(Inplace(), tokens())


def test_random_numbers_are_drawn_in_the_order_of_the_plain_model() -> None:
    class Noisy(BlockModel):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            x = x + torch.randn(x.shape) + 0.1 * torch.rand_like(x)
            x = F.dropout(x, 0.3, self.training)
            x = F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
            for block in self.blocks:
                x = F.dropout(block(x), 0.1, self.training)
            return self.head(x + torch.randn_like(x))

    assert_staged_between_blocks(Noisy(), tokens())


def test_hooks_on_the_hidden_state() -> None:
    class Hooked(BlockModel):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            x.register_hook(lambda grad: grad * 2)
            for block in self.blocks:
                x = block(x)
            x.register_hook(lambda grad: grad * 3)
            return self.head(x)

    assert_staged_between_blocks(Hooked(), tokens())


def test_a_checkpoint_around_each_block() -> None:
    class Saving(BlockModel):
        def forward(self, ids: Tensor, reentrant: bool) -> Tensor:
            x = self.drop(self.embed(ids))
            for block in self.blocks:
                x = checkpoint(block, x, None, use_reentrant=reentrant)
            return self.head(x)

    for reentrant in (False, True):
        model = Saving()
        for block in model.blocks:
            block.norm.eval()  # a BatchNorm would count a recomputed batch twice
        assert_staged_between_blocks(model, tokens(), reentrant)


# ── the order of the blocks ──────────────────────────────────────────────────────────────────────────────────────


class Ordered(BlockModel):
    order: tuple[int, ...] = (0, 1, 2, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for i in self.order:
            x = self.blocks[i](x)
        return self.head(x)


def test_blocks_in_another_order() -> None:
    model = Ordered()
    model.order = (0, 2, 1, 3)
    chain = assert_staged_between_blocks(model, tokens())
    assert chain.layers == ("blocks.0", "blocks.2", "blocks.1", "blocks.3")


def test_blocks_that_are_left_out() -> None:
    model = Ordered()
    model.order = (0, 3)
    chain = chain_of_blocks(model, tokens())
    assert chain.layers == ("blocks.0", "blocks.3")
    plan = plan_of_sizes(chain, [1, 1])
    assert_staged(model, plan, tokens())
    assert set(model.state_dict()) == {name for s in range(2) for name in plan.stage_module(s).state_dict()}
    model.order = ()
    assert_staged(model, plan_of_sizes(chain_of_blocks(model, tokens()), [1]), tokens())


def test_blocks_that_run_more_than_once() -> None:
    for order in ((0, 1, 1, 2, 3), (0, 1, 2, 3, 0)):
        model = Ordered()
        for block in model.blocks:
            block.norm = nn.Identity()  # running statistics cannot be kept in two stages
        model.order = order
        chain = chain_of_blocks(model, tokens())
        for size in range(1, len(chain.layers)):
            assert_staged(model, plan_of_sizes(chain, [size, len(chain.layers) - size]), tokens())


def test_blocks_that_are_left_out_at_random() -> None:
    class Dropping(BlockModel):
        chance = 0.0

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for block in self.blocks:
                if self.training and torch.rand([]) < self.chance:
                    continue
                x = block(x)
            return self.head(x)

    model = Dropping()
    assert_staged_between_blocks(model, tokens())
    model.chance = 0.5
    with pytest.raises(PlanError, match=r"test_blocks.py:\d+: `if self.training and torch.rand"):
        chain_of_blocks(model, tokens())


# ── parameters, buffers and modules of stages ────────────────────────────────────────────────────────────────────


def test_layers_are_the_blocks_and_the_ends_hold_the_rest() -> None:
    chain = chain_of_blocks(Masked(), tokens())
    assert chain.layers == ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
    names = [{name for name, _ in chain.members(layer)} for layer in chain.layers]
    assert {"embed.weight", "pos"} <= names[0]
    assert {"norm.weight", "head.bias"} <= names[3]
    assert all(name.startswith("blocks.1.") for name in names[1])
    model = chain.model
    assert set.union(*names) == {*dict(model.named_parameters()), *dict(model.named_buffers())}


def test_a_big_embedding_counts_in_the_balance() -> None:
    model = Masked(6)
    model.embed = nn.Embedding(1000, WIDTH)
    assert len(balance_stages(chain_of_blocks(model, tokens()), balance=None, stages=3)[0]) == 1


def test_a_stage_has_its_own_modules_under_the_models_names_and_no_others() -> None:
    model = Masked()
    plan = plan_of_sizes(chain_of_blocks(model, tokens()), [1, 2, 1])
    modules = [plan.stage_module(s) for s in range(3)]
    assert modules[1].get_submodule("blocks.1") is model.blocks[1]
    assert modules[0].get_submodule("embed") is model.embed
    assert modules[2].get_submodule("head") is model.head
    names = [set(module.state_dict()) for module in modules]
    assert set.union(*names) == set(model.state_dict())
    assert sum(map(len, names)) == len(model.state_dict())
    parameters = dict(model.named_parameters())
    assert all(parameters[name] is p for module in modules for name, p in module.named_parameters())


def test_an_embedding_that_is_also_the_head_is_a_tie() -> None:
    class Reused(BlockModel):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.drop(self.embed(ids))
            for block in self.blocks:
                x = block(x)
            return F.linear(x, self.embed.weight)

    chain = assert_staged_between_blocks(Reused(), tokens())
    assert plan_of_sizes(chain, [4]).ties == ()
    plan = plan_of_sizes(chain, [2, 2])
    assert [tie.names for tie in plan.ties] == [("embed.weight",)]
    assert "embed.weight" in dict(plan.stage_module(1).named_parameters())


def test_a_parameter_that_every_block_is_given_is_in_every_stage() -> None:
    class Shared(BlockModel):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.randn(WIDTH))

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x, bias=self.bias)
            return self.head(x)

    plan = plan_of_sizes(assert_staged_between_blocks(Shared(), tokens()), [1, 2, 1])
    assert all("bias" in dict(plan.stage_module(s).named_parameters()) for s in range(3))


def test_a_buffer_that_every_block_is_given() -> None:
    class Causal(BlockModel):
        def __init__(self, persistent: bool) -> None:
            super().__init__()
            self.register_buffer("mask", tril(), persistent)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x, self.mask[: ids.shape[1]])
            return self.head(x)

    for persistent in (True, False):
        plan = plan_of_sizes(assert_staged_between_blocks(Causal(persistent), tokens()), [2, 2])
        for s in range(2):
            assert "mask" in dict(plan.stage_module(s).named_buffers())
            assert ("mask" in plan.stage_module(s).state_dict()) == persistent


def test_a_buffer_changed_in_place_is_changed_once() -> None:
    class Counting(BlockModel):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))
            self.register_buffer("mean", torch.zeros(WIDTH))

        def forward(self, ids: Tensor) -> Tensor:
            self.steps += 1
            x = self.embed(ids)
            self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    model = Counting()
    assert_staged_between_blocks(model, tokens())
    assert model.steps == len(SIZES)


def test_parts_are_in_the_stage_that_uses_them() -> None:
    class Unordered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(WIDTH, TOKENS)
            self.gain = nn.Parameter(torch.ones(TOKENS))
            self.blocks = nn.ModuleList(Block() for _ in range(4))
            self.embed = nn.Embedding(TOKENS, WIDTH)

        def forward(self, ids: Tensor) -> Tensor:
            x = dict(self.named_children())["embed"](ids)
            for block in self.blocks:
                x = block(x)
            return self.end(x)

        def end(self, x: Tensor) -> Tensor:
            return self._modules["head"](x) * self.gain

    plan = plan_of_sizes(assert_staged_between_blocks(Unordered(), tokens()), [2, 2])
    first, last = (set(dict(plan.stage_module(s).named_parameters())) for s in range(2))
    assert {"head.weight", "gain"} <= last - first
    assert "embed.weight" in first - last


def test_stages_of_a_meta_model_are_materialised_one_by_one() -> None:
    with torch.device("meta"):
        model = Masked()
    plan = plan_of_sizes(chain_of_blocks(model, tokens()), [2, 2])
    stage = plan.stage_module(1).to_empty(device="cpu")
    assert {p.device.type for p in stage.parameters()} == {"cpu"}
    assert model.embed.weight.is_meta
    assert model.pos.is_meta
    for parameter in stage.parameters():
        nn.init.ones_(parameter)
    for block in (stage.get_submodule("blocks.2"), stage.get_submodule("blocks.3")):
        block.norm.reset_running_stats()
    plan.require_chain().last.key = plan.require_chain().variant({"ids": tokens()})
    output = stage(hidden())  # without the stage that is on the meta device
    assert output.shape == (3, 6, TOKENS)
    assert output.device.type == "cpu"


def test_a_saved_plan_has_the_same_layers() -> None:
    chain = chain_of_blocks(Masked(), tokens(), tril())
    again = TraceChain.from_recipe(Masked(), chain.recipe)
    assert again.recipe == chain.recipe
    assert again.layers == chain.layers
    assert plan_of_sizes(again, [1, 3]).edges == plan_of_sizes(chain, [1, 3]).edges


# ── stages and the model ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_split_does_not_change_the_model() -> None:
    model = Masked()
    with untouched(model):
        plan = plan_of_sizes(chain_of_blocks(model, tokens()), [2, 2])
        [plan.stage_module(s) for s in range(2)]


def test_train_and_eval_of_stages_and_of_the_model() -> None:
    class Both(BlockModel):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.drop(self.embed(ids))
            for block in self.blocks:
                x = F.dropout(block(x), 0.5, self.training)
            return self.head(self.drop(x))

    model = Both()
    plan = plan_of_sizes(chain_of_blocks(model, tokens()), [1, 2, 1])
    modules = [plan.stage_module(s) for s in range(3)]
    for module in modules:
        module.eval()
    assert not model.training
    assert_staged(model, plan, tokens(), modules=modules)
    model.train()
    model.blocks[1].eval()
    assert_staged(model, plan, tokens(), modules=modules)


def test_hooks_on_blocks_and_parts_run_once_on_the_models_own() -> None:
    model = Masked()
    seen: list[nn.Module] = []
    for part in (*model.blocks, model.embed, model.norm, model.head):
        part.register_forward_hook(lambda module, args, output: seen.append(module))
    run_stages(plan_of_sizes(chain_of_blocks(model, tokens()), [1, 1, 2]), (tokens(),), {})
    assert seen == [model.embed, *model.blocks, model.norm, model.head]


def test_stages_run_at_the_same_time_in_threads() -> None:
    model = Masked().eval()
    plan = plan_of_sizes(chain_of_blocks(model, tokens()), [1, 1, 1, 1])
    want = model(tokens()).detach()
    wrong: list[Any] = []

    def work() -> None:
        modules = [plan.stage_module(s) for s in range(4)]
        for _ in range(5):
            got = run_stages(plan, (tokens(),), {}, modules)
            if not torch.equal(got, want):
                wrong.append(got)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_copies_of_stages_run_on_fake_tensors_and_change_nothing() -> None:
    model = Masked()
    plan = plan_of_sizes(chain_of_blocks(model, tokens()), [2, 2])
    with untouched(model):
        fakes = [FakeStage(s, plan.stage_module(s), torch.device("cpu")) for s in range(2)]
        with fakes[0].mode:
            sent = fakes[0].run({"ids": torch.empty(3, 6, dtype=torch.long)})
        with fakes[1].mode:
            output = fakes[1].run(torch.empty(sent.shape))
    assert output.shape == (3, 6, TOKENS)


def test_a_copied_stage_is_apart_from_the_model() -> None:
    model = Masked()
    plan = plan_of_sizes(chain_of_blocks(model, tokens()), [2, 2])
    copied = [copy.deepcopy(plan.stage_module(s)).eval() for s in range(2)]
    assert model.training
    run_stages(plan, (tokens(),), {}, copied).sum().backward()
    assert all(p.grad is None for p in model.parameters())


def test_a_call_leaves_nothing_for_the_garbage_collector() -> None:
    model = Masked()
    plan = plan_of_sizes(chain_of_blocks(model, tokens()), [2, 2])
    modules = [plan.stage_module(s) for s in range(2)]
    gc.collect()
    gc.disable()
    try:
        sent = modules[0]({"ids": tokens()})
        watched = weakref.ref(sent)
        del sent
        assert watched() is None
        output = modules[1](received := hidden())
        watched = weakref.ref(received)
        del output, received
        assert watched() is None
    finally:
        gc.enable()


def test_stages_leave_no_mode_behind() -> None:
    plan = plan_of_sizes(chain_of_blocks(Masked(), tokens()), [2, 2])
    run_stages(plan, (tokens(),), {})
    with pytest.raises(IndexError):
        run_stages(plan, (tokens() + 100,), {})
    assert torch.overrides._get_current_function_mode() is None


# ── refused ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_names_that_are_no_list_of_blocks() -> None:
    empty, twice = Masked(), Masked()
    empty.blocks = nn.ModuleList()
    twice.blocks = nn.ModuleList([block := Block(), block])
    for model, name, message in [
        (Masked(), "block", "there is no 'block' in Masked: did you mean 'blocks'"),
        (Masked(), "embed", "is a Embedding, not an nn.ModuleList"),
        (Masked(), "", "is a Masked, not an nn.ModuleList"),
        (Masked(), 3, "must be the name of a list of modules"),
        (empty, "blocks", "nothing to split"),
        (twice, "blocks", "more than once"),
    ]:
        with pytest.raises(PlanError, match=message):
            trace_chain(model, stages=None, blocks=name)


def test_a_decision_by_a_value_that_depends_on_parameters() -> None:
    class Decides(BlockModel):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            if x.sum() > 0:
                x = x * 2
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    with pytest.raises(PlanError, match=r"test_blocks.py:\d+: `if x.sum\(\) > 0:`.*known only when the model runs"):
        chain_of_blocks(Decides(), tokens())


def test_attributes_set_by_the_forward() -> None:
    class Counts(BlockModel):
        calls = 0

        def forward(self, ids: Tensor) -> Tensor:
            self.calls += 1
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x)
            return x

    with pytest.raises(PlanError, match="sets calls"):
        chain_of_blocks(Counts(), tokens())


def test_hooks_on_the_model() -> None:
    model = Masked()
    plan = plan_of_sizes(chain_of_blocks(model, tokens()), [2, 2])
    modules = [plan.stage_module(s) for s in range(2)]
    model.register_forward_hook(lambda module, args, output: None)
    with pytest.raises(PlanError, match="Masked has hooks"):
        chain_of_blocks(model, tokens())
    with pytest.raises(PlanError, match="Masked has hooks"):
        run_stages(plan, (tokens(),), {}, modules)
