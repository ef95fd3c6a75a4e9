"""Models with a trunk as people write them, and the equality of a model in stages with the whole one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.split.plan import Plan, build_plan, run_stages
from penstock.split.trunk.line import trunk_chain

WIDTH, TOKENS = 8, 16


class Block(nn.Module):
    """Mixes positions under a mask, then channels; dropout and a BatchNorm, so that order and state show."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor, mask: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        y = x if mask is None else mask @ x
        y = self.norm(y.transpose(1, 2)).transpose(1, 2)
        y = self.mix(y) if bias is None else self.mix(y) + bias
        return x + self.drop(F.gelu(y))


class Trunked(nn.Module):
    """The parts that most of the models here have."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.pos = nn.Parameter(torch.randn(6, WIDTH))
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)


class Usual(Trunked):
    """Embedding, a positional parameter, dropout; norm and head."""

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(ids) + self.pos
        x = self.drop(x)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def tokens(seed: int = 1) -> Tensor:
    return torch.randint(TOKENS, (3, 6), generator=torch.Generator().manual_seed(seed))


def hidden(seed: int = 1) -> Tensor:
    return torch.randn(3, 6, WIDTH, generator=torch.Generator().manual_seed(seed))


def tril() -> Tensor:
    return torch.ones(6, 6).tril() / 6


def cut(model: nn.Module, sizes: Sequence[int], blocks: str | None = "blocks") -> Plan:
    """A plan with ``sizes[i]`` blocks in stage ``i``."""
    line = trunk_chain(model, blocks)
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return build_plan(line, [line.layers[end - size : end] for size, end in zip(sizes, ends, strict=True)])


def answer(model: nn.Module, output: Any) -> dict[str, Any]:
    """Outputs, loss, gradients, buffers and random state after a backward."""
    leaves = [leaf for leaf in pytree.tree_leaves(_plain(output)) if isinstance(leaf, Tensor)]
    given = _plain(output).get("loss") if isinstance(_plain(output), dict) else None
    loss = given if given is not None else sum(leaf.pow(2).sum() for leaf in leaves if leaf.requires_grad)
    if isinstance(loss, Tensor) and loss.requires_grad:
        loss.backward()
    found: dict[str, Any] = {f"output {i}": leaf.detach() for i, leaf in enumerate(leaves)}
    named = dict(model.named_parameters(remove_duplicate=False))
    found |= {f"gradient of {name}": parameter.grad for name, parameter in named.items()}
    found |= {f"buffer {name}": buffer for name, buffer in model.named_buffers(remove_duplicate=False)}
    return found | {"random state": torch.get_rng_state()}


def assert_staged(
    model: nn.Module, plan: Plan, *args: Any, seed: int = 0, modules: Sequence[nn.Module] | None = None, **kwargs: Any
) -> Any:
    """The stages of ``plan`` compute what the whole model does, bit for bit; gives what the last stage returned."""
    whole = copy.deepcopy(model)
    torch.manual_seed(seed)
    want = answer(whole, whole(*args, **kwargs))
    torch.manual_seed(seed)
    output = run_stages(plan, args, kwargs, modules)
    got = answer(model, output)
    assert list(got) == list(want)
    for name, value in want.items():
        assert (value is None) == (got[name] is None), name
        assert value is None or torch.equal(value, got[name]), name
    return output


def _plain(output: Any) -> Any:
    return dict(output) if isinstance(output, dict) else output
