"""Where a trunk is, and the forwards that stages cannot follow: each an error that names the place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.errors import PlanError
from penstock.split.plan import build_plan, run_stages
from penstock.split.trunk.line import find_trunk, trunk_chain
from tests.split.trunk_models import Block, Trunked, Usual, assert_staged, cut, hidden, tokens

# ── where the trunk is ───────────────────────────────────────────────────────────────────────────────────────────


def test_the_list_that_holds_most_of_the_parameters_is_the_trunk() -> None:
    assert find_trunk(Usual()) == "blocks"
    assert trunk_chain(Usual(), None).layers[0] == "blocks.0"


def test_a_model_that_does_not_say() -> None:
    model = Usual()
    model.more = nn.ModuleList(Block() for _ in range(4))
    assert find_trunk(model) is None
    with pytest.raises(PlanError, match=r"does not say where its trunk is.*blocks='blocks' \(or more\)"):
        trunk_chain(model, None)
    with pytest.raises(PlanError, match="no list of blocks"):
        trunk_chain(nn.Linear(2, 2), None)


def test_an_unknown_name_comes_with_near_ones() -> None:
    with pytest.raises(PlanError, match="there is no 'block' in Usual: did you mean 'blocks'"):
        trunk_chain(Usual(), "block")


@pytest.mark.parametrize("name", ["embed", ""])
def test_a_name_of_something_else_than_a_list(name: str) -> None:
    with pytest.raises(PlanError, match=r"is a (Embedding|Usual), not an nn.ModuleList"):
        trunk_chain(Usual(), name)


def test_lists_with_nothing_in_them_or_one_block_twice() -> None:
    model = Usual()
    model.blocks = nn.ModuleList()
    with pytest.raises(PlanError, match="nothing to split"):
        trunk_chain(model, "blocks")
    model.blocks = nn.ModuleList([block := Block(), block])
    with pytest.raises(PlanError, match="more than once"):
        trunk_chain(model, "blocks")


# ── forwards that stages cannot follow ───────────────────────────────────────────────────────────────────────────


def refused(model: nn.Module, sizes: tuple[int, ...], *args: Any, match: str) -> None:
    plan = cut(model, sizes)
    with pytest.raises(PlanError, match=match):
        run_stages(plan, args, {})


class Ordered(Trunked):
    order: tuple[int, ...] = (0, 1, 2, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for i in self.order:
            x = self.blocks[i](x)
        return self.head(x)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ((0, 2, 1, 3), r"skips blocks.1 and runs blocks.2 \(at .*test_trunk_errors.py:\d+\)"),
        ((0, 1, 3), "skips blocks.2 and runs blocks.3"),
        ((0, 1, 2, 3, 0), "runs blocks.0 again, after blocks.3"),
        ((0, 1, 1, 2, 3), "runs blocks.1 again"),
        ((), "never runs blocks.0"),
        ((0, 1, 2), "ends after blocks.2, and never runs blocks.3"),
    ],
)
def test_blocks_must_run_once_each_in_their_order(order: tuple[int, ...], message: str) -> None:
    for sizes in ((2, 2), (1, 1, 2)):
        model = Ordered()
        model.order = order
        refused(model, sizes, tokens(), match=message)


def test_a_block_left_out_by_chance_is_an_error_and_a_chance_of_nothing_is_not() -> None:
    class Dropping(Trunked):
        chance = 0.0

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for block in self.blocks:
                if self.training and torch.rand([]) < self.chance:
                    continue
                x = block(x)
            return self.head(x)

    model = Dropping()
    assert_staged(model, cut(model, [1, 1, 2]), tokens())
    model.chance = 1.0
    refused(model, (2, 2), tokens(), match="never runs blocks.0")


def test_a_value_from_before_the_trunk_that_every_block_needs() -> None:
    class Conditioned(Trunked):
        def forward(self, ids: Tensor, time: Tensor) -> Tensor:
            x, condition = self.embed(ids), self.norm(time)
            for block in self.blocks:
                x = block(x, bias=condition)
            return self.head(x)

    refused(Conditioned(), (2, 2), tokens(), hidden(), match=r"bias of blocks.2 is computed from norm.*Let each block")


def test_the_input_of_the_trunk_used_between_blocks_and_after_them() -> None:
    class Again(Trunked):
        def forward(self, ids: Tensor, where: str) -> Tensor:
            first = x = self.embed(ids)
            for block in self.blocks:
                x = block(x) + (first if where == "between" else 0)
            return self.head(x + first) if where == "after" else self.head(x)

    refused(Again(), (2, 2), tokens(), "between", match="used after blocks.1 is computed from embed")
    refused(
        Again(), (2, 2), tokens(), "after", match=r"used after blocks.3 is computed from embed.*test_trunk_errors.py"
    )


def test_an_output_that_only_the_first_stage_has() -> None:
    class Returns(Trunked):
        def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
            first = x = self.embed(ids)
            for block in self.blocks:
                x = block(x)
            return self.head(x), first

    refused(Returns(), (2, 2), tokens(), match="a part of the model's output is computed from embed")


def test_random_numbers_that_every_block_is_given() -> None:
    class Masks(Trunked):
        def forward(self, ids: Tensor) -> Tensor:
            x, mask = self.embed(ids), torch.rand(6, 6)
            for block in self.blocks:
                x = block(x, mask)
            return self.head(x)

    refused(Masks(), (2, 2), tokens(), match=r"argument 1 of blocks.2 is computed from random numbers, drawn by rand")


def test_a_decision_by_what_another_stage_computed() -> None:
    class Decides(Trunked):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            if x.sum() > 0:
                x = x * 2
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    refused(Decides(), (2, 2), tokens(), match=r"decides by __bool__\(\) is computed from embed")


def test_a_part_whose_use_the_source_does_not_show() -> None:
    class Hidden(Trunked):
        def forward(self, ids: Tensor) -> Tensor:
            parts = dict(self.named_children())
            x = parts["embed"](ids)
            for block in self.blocks:
                x = block(x)
            return self.ends()(x)

        def ends(self) -> Any:
            return self._modules["embed"] if self.pos is None else self.drop

    model = Hidden()
    assert_staged(model, cut(model, [2, 2]), tokens())


def test_a_reentrant_checkpoint_cannot_send_its_gradient_on() -> None:
    class Reentrant(Trunked):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
            return self.head(x)

    refused(Reentrant(), (2, 2), tokens(), match=r"blocks.1, the last block of stage 0.*use_reentrant=False")


def test_a_block_that_returns_what_cannot_be_sent() -> None:
    class Wrapped(nn.Module):
        def forward(self, x: Any) -> Any:
            return SimpleNamespace(x=x if isinstance(x, Tensor) else x.x)

    class Wraps(Trunked):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x)
            return self.head(x.x)

    model = Wraps()
    model.blocks = nn.ModuleList(Wrapped() for _ in range(4))
    refused(model, (2, 2), tokens(), match="blocks.1 returned a SimpleNamespace, which stage 0 cannot send on")


def test_rows_of_a_blank_are_blanks() -> None:
    class Rows(Trunked):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            bias = [row for row in x.mean(0)][0]  # noqa: C416, RUF015
            for block in self.blocks:
                x = block(x, bias=bias)
            return self.head(x)

    refused(Rows(), (2, 2), tokens(), match="bias of blocks.2 is computed from embed")


def test_hooks_on_containers_would_run_once_per_stage() -> None:
    model = Usual()
    plan = cut(model, [2, 2])
    modules = [plan.stage_module(s) for s in range(2)]
    model.register_forward_hook(lambda module, args, output: None)
    with pytest.raises(PlanError, match="Usual itself has hooks"):
        cut(model, [2, 2])
    with pytest.raises(PlanError, match="Usual itself has hooks"):
        run_stages(plan, (tokens(),), {}, modules)


def test_a_forward_put_on_the_object() -> None:
    model = Usual()
    original = model.forward
    model.forward = lambda *args: original(*args)
    with pytest.raises(PlanError, match="forward of Usual was replaced"):
        cut(model, [2, 2])
    model = Usual()
    model.compile(backend="eager")
    with pytest.raises(PlanError, match="forward of Usual was replaced"):
        cut(model, [2, 2])


def test_a_stage_called_without_what_it_needs() -> None:
    plan = cut(Usual(), [1, 1, 2])
    with pytest.raises(PlanError, match=r"stage 0 .*takes the model's arguments by name, got 1 values: \['Tensor'\]"):
        plan.stage_module(0)(tokens())
    with pytest.raises(PlanError, match=r"stage 2 .*and what blocks.1 returned, got 1 values"):
        plan.stage_module(2)(hidden())


def test_an_error_on_the_way_to_the_first_block_says_where_the_numbers_come_from() -> None:
    class Narrows(Trunked):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for i, block in enumerate(self.blocks):
                x = block(x)
                if i == 0:
                    x = x[:, :5] + self.pos[:5]
                if i == 1:
                    x = x[:, :2]
            return self.head(x)

    with pytest.raises(RuntimeError, match="size of tensor") as raised:
        run_stages(cut(Narrows(), [2, 1, 1]), (tokens(),), {})
    assert "In stage 2, on the way to blocks.3" in raised.value.__notes__[0]


def test_stages_must_follow_the_order_of_the_blocks() -> None:
    line = trunk_chain(Usual(), "blocks")
    with pytest.raises(PlanError, match="blocks that follow each other"):
        build_plan(line, [("blocks.1", "blocks.0"), ("blocks.2", "blocks.3")])
