"""Checks for models cut by tracing: they run like the plain model, and the model stays unchanged."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from penstock.split.plan import LayerChain, Plan, build_plan, run_stages
from penstock.split.trace.chain import TraceChain
from penstock.split.trace.front_end import trace_chain
from tests.split.trace_models import Output


def chain_for(model: nn.Module, **how: Any) -> TraceChain:
    return trace_chain(model, **{"stages": None, "cuts": None, **how})


def cut_everywhere(model: nn.Module, **how: Any) -> Plan:
    """A stage for each layer."""
    chain = chain_for(model, **how)
    return build_plan(chain, [(layer,) for layer in chain.layers])


def every_cut(chain: LayerChain) -> Iterator[list[tuple[str, ...]]]:
    """The layers in stages, for every subset of the cuts."""
    places = range(1, len(chain.layers))
    for count in range(len(chain.layers)):
        for chosen in itertools.combinations(places, count):
            bounds = [0, *chosen, len(chain.layers)]
            yield [chain.layers[a:b] for a, b in itertools.pairwise(bounds)]


def leaves(value: Any) -> list[Any]:
    if isinstance(value, Output):
        return leaves((value.logits, value.hidden))
    return list(pytree.tree_leaves(value, is_leaf=lambda item: item is None))


def assert_equal(one: Any, other: Any) -> None:
    """Two values are the same tree of the same types with the same tensors, bit for bit."""
    assert type(one) is type(other)
    if not isinstance(one, Output):
        assert pytree.tree_structure(one) == pytree.tree_structure(other)
    for a, b in zip(leaves(one), leaves(other), strict=True):
        if isinstance(a, Tensor):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
        else:
            assert a == b


def backward(value: Any) -> None:
    tensors = [leaf for leaf in leaves(value) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if tensors:
        torch.stack([tensor.float().pow(2).sum() for tensor in tensors]).sum().backward()


def assert_runs_as_plain(plan: Plan, *args: Any, **kwargs: Any) -> Any:
    """Output, gradients, buffers and random state of the stages are those of the plain model, in train and in eval."""
    model = plan.require_chain().model
    modes = [module.training for module in model.modules()]
    for training in (True, False):
        plain = copy.deepcopy(model)
        modules = [plan.stage_module(index) for index in range(plan.num_stages)]
        plain.train(training)
        for module in modules:
            module.train(training)
        torch.manual_seed(3)
        expected = plain(*args, **kwargs)
        backward(expected)
        drawn = torch.get_rng_state()
        torch.manual_seed(3)
        output = run_stages(plan, args, kwargs, modules)
        assert_equal(output, expected)
        backward(output)
        assert torch.equal(torch.get_rng_state(), drawn)
        for (name, mine), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None), name
            if mine.grad is not None:
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=0)
            mine.grad = None
        assert_equal(dict(model.named_buffers()), dict(plain.named_buffers()))
    for module, mode in zip(model.modules(), modes, strict=True):
        module.training = mode
    return expected


def assert_owned(plan: Plan) -> None:
    """The stages hold all of the model's state under its own names, and its own objects."""
    model = plan.require_chain().model
    names: dict[str, Tensor] = {}
    for index in range(plan.num_stages):
        stage = plan.stage_module(index)
        mine = dict(stage.named_parameters(remove_duplicate=False)) | dict(stage.named_buffers(remove_duplicate=False))
        listed = {name for layer in plan.groups[index] for name, _ in plan.require_chain().members(layer)}
        assert set(mine) == listed
        names |= mine
        assert set(stage.state_dict()) <= set(model.state_dict())
    theirs = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    assert set(names) == set(theirs)
    assert all(names[name] is theirs[name] for name in theirs)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """The code inside must leave the model and the random state unchanged."""

    def picture() -> Any:
        parts = [(name, id(module), list(vars(module)), [id(v) for v in vars(module).values()])
                 for name, module in model.named_modules()]  # fmt: skip
        modes = [module.training for module in model.modules()]
        hooks = [len(module._forward_hooks) for module in model.modules()]
        state = {k: (id(v), v.clone(), v._version) for k, v in model.state_dict(keep_vars=True).items()}
        return parts, modes, hooks, state

    before, rng = picture(), torch.get_rng_state()
    call, attribute = nn.Module.__call__, nn.Module.__getattr__
    yield
    after = picture()
    assert before[:3] == after[:3]
    for name, (identity, value, version) in before[3].items():
        assert after[3][name][0] == identity, name
        assert after[3][name][2] == version, name
        assert torch.equal(after[3][name][1], value), name
    assert torch.equal(torch.get_rng_state(), rng)
    assert nn.Module.__call__ is call
    assert nn.Module.__getattr__ is attribute
