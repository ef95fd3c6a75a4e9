"""Models with a list of blocks, and the equality of a model in stages with the plain one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.split.plan import LayerChain, Plan, build_plan, run_stages
from penstock.split.trace.chain import TraceChain
from penstock.split.trace.front_end import trace_chain

WIDTH, TOKENS = 8, 16
SIZES = [(4,), (2, 2), (1, 3), (3, 1), (1, 2, 1), (1, 1, 1, 1)]


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


class BlockModel(nn.Module):
    """The parts that most of the models here have."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.pos = nn.Parameter(torch.randn(6, WIDTH))
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)


class Masked(BlockModel):
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


def chain_of_blocks(model: nn.Module, *args: Any, blocks: str = "blocks", **kwargs: Any) -> TraceChain:
    """The chain for this call, with cuts between the blocks."""
    return trace_chain(model, stages=None, blocks=blocks, sample=(args, kwargs))


def plan_of_sizes(chain: LayerChain, sizes: Sequence[int]) -> Plan:
    """A plan with ``sizes[i]`` layers in stage ``i``."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return build_plan(chain, [chain.layers[end - size : end] for size, end in zip(sizes, ends, strict=True)])


def answer(model: nn.Module, output: Any) -> dict[str, Any]:
    """Outputs, loss, gradients, buffers and random state after a backward."""
    leaves = [leaf for leaf in pytree.tree_leaves(_plain(output)) if isinstance(leaf, Tensor)]
    given = _plain(output).get("loss") if isinstance(_plain(output), dict) else None
    loss = given if given is not None else sum(leaf.float().pow(2).sum() for leaf in leaves if leaf.requires_grad)
    if isinstance(loss, Tensor) and loss.requires_grad:
        loss.backward()
    found: dict[str, Any] = {f"output {i}": leaf.detach() for i, leaf in enumerate(leaves)}
    named = dict(model.named_parameters(remove_duplicate=False))
    found |= {f"gradient of {name}": parameter.grad for name, parameter in named.items()}
    found |= {f"buffer {name}": buffer for name, buffer in model.named_buffers(remove_duplicate=False)}
    return found | {"random state": torch.get_rng_state()}


def assert_staged(
    model: nn.Module, plan: Plan, *args: Any, modules: Sequence[nn.Module] | None = None, **kwargs: Any
) -> Any:
    """The stages of ``plan`` compute the same as the plain model, bit for bit; returns the last stage's output."""
    model.zero_grad()
    plain = copy.deepcopy(model)
    torch.manual_seed(0)
    expected = plain(*args, **kwargs)
    want = answer(plain, expected)
    torch.manual_seed(0)
    output = run_stages(plan, args, kwargs, modules)
    assert type(output) is type(expected)
    got = answer(model, output)
    assert list(got) == list(want)
    for name, value in want.items():
        assert (value is None) == (got[name] is None), name
        assert value is None or torch.equal(value, got[name]), name
    return output


def assert_staged_between_blocks(model: nn.Module, *args: Any, blocks: str = "blocks", **kwargs: Any) -> TraceChain:
    """A model with four blocks is equal to the plain one in one to four stages; returns its chain."""
    chain = chain_of_blocks(model, *args, blocks=blocks, **kwargs)
    for sizes in SIZES:
        assert_staged(model, plan_of_sizes(chain, sizes), *args, **kwargs)
    return chain


def _plain(output: Any) -> Any:
    return dict(output) if isinstance(output, dict) else output
