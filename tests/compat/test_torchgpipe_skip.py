"""torchgpipe's skips: the decorator, its errors, namespaces. With GPipe: test_torchgpipe_training."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.compat.torchgpipe import GPipe
from penstock.compat.torchgpipe.skip import Namespace, pop, skippable, stash, verify_skippables
from penstock.compat.torchgpipe.skip.skippable import Skippable


def stashes(*names: str) -> Any:
    @skippable(stash=names)
    class Stash(nn.Module):
        def forward(self, x: Tensor) -> Any:
            for name in names:
                yield stash(name, x)
            return x * 2

    return Stash()


def pops(*names: str) -> Any:
    @skippable(pop=names)
    class Pop(nn.Module):
        def forward(self, x: Tensor) -> Any:
            found = []
            for name in names:
                found.append((yield pop(name)))
            return sum(found)

    return Pop()


def test_dispatch_calls_the_given_functions() -> None:
    x, kept = torch.ones(2), {}
    assert torch.equal(stashes("a", "b").dispatch(x, kept.__setitem__, kept.pop), x * 2)
    assert list(kept) == ["a", "b"]
    assert torch.equal(pops("b", "a").dispatch(x * 5, kept.__setitem__, kept.pop), x * 2)
    assert not kept

    @skippable()
    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 3

    layer: Any = Plain()
    assert torch.equal(layer.dispatch(x, kept.__setitem__, kept.pop), x * 3)


@skippable(stash=["hello"])
class Hello(nn.Module):
    """A layer."""

    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, width, 1)

    def forward(self, x: Tensor) -> Any:
        yield stash("hello", x)
        return self.conv(x)


# ── the decorated class ──────────────────────────────────────────────────────────────────────────────────────────


def test_skippable_wraps_the_layer() -> None:
    layer = Hello(width=3)
    assert isinstance(layer, (Hello, Skippable))
    assert Hello.__doc__ == "A layer."
    assert set(layer.state_dict()) == {"module.conv.weight", "module.conv.bias"}
    assert layer.module.conv.out_channels == 3
    assert repr(layer) == f"@skippable({layer.module!r})"
    assert repr(layer).startswith("@skippable(Hello(\n  (conv): Conv2d(1, 3")


def test_keys_in_a_gpipe_are_torchgpipes() -> None:
    model = GPipe(nn.Sequential(Hello(), nn.Identity(), pops("hello")), [2, 1], devices=["cpu"] * 2)
    assert set(model.state_dict()) == {"partitions.0.0.module.conv.weight", "partitions.0.0.module.conv.bias"}


def test_names_may_be_isolated_some_or_all() -> None:
    layer, ns, other = stashes("a", "b"), Namespace(), Namespace()
    assert layer.isolate(ns, only=["a"]) is layer
    assert layer.stashes() == [(ns, "a"), (None, "b")]
    assert layer.isolate(other).stashes() == [(other, "a"), (other, "b")]
    assert layer.isolate(None, only=["b"]).stashes() == [(other, "a"), (None, "b")]
    assert layer.pops() == []


def test_namespaces_differ_and_their_copies_do_not() -> None:
    one, other = Namespace(), Namespace()
    assert one != other
    assert copy.copy(one) == one
    assert copy.copy(one) is not one


def test_a_copy_of_a_layer_works_with_the_original() -> None:
    ns = Namespace()
    model = nn.Sequential(copy.deepcopy(stashes("a").isolate(ns)), pops("a").isolate(ns))
    assert model(torch.ones(2)).tolist() == [1, 1]


# ── use ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_skips_without_a_pipeline() -> None:
    x = torch.ones(3, requires_grad=True)
    nn.Sequential(stashes("a"), nn.Identity(), pops("a"))(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1, 1, 1]


def undeclared(kind: str) -> Any:
    @skippable(**{"pop" if kind == "stash" else "stash": []})
    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Any:
            yield stash("foo", x) if kind == "stash" else pop("foo")
            return x

    return Layer()


def idle(**names: list[str]) -> Any:
    @skippable(**names)
    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    return Layer()


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (undeclared("stash"), "^'foo' has not been declared as stashable$"),
        (undeclared("pop"), "^'foo' has not been declared as poppable$"),
        (idle(stash=["foo", "bar"]), "^'foo', 'bar' must be stashed but have not$"),
        (idle(pop=["foo"]), "^'foo' must be popped but have not$"),
        (pops("foo"), "^'foo' has not been stashed$"),
    ],
)
def test_wrong_use_is_a_runtime_error_in_torchgpipes_words(layer: Any, text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        layer(torch.ones(1))


def test_wrong_use_in_a_gpipe_is_the_same_error() -> None:
    model = GPipe(nn.Sequential(nn.Identity(), undeclared("stash")), [1, 1], devices=["cpu"] * 2)
    with pytest.raises(RuntimeError, match="'foo' has not been declared as stashable"):
        model(torch.ones(1))


def test_a_string_instead_of_a_list_of_names_is_refused() -> None:
    with pytest.raises(ValueError, match="must be a list of names"):
        skippable(stash="foo")


# ── matching ─────────────────────────────────────────────────────────────────────────────────────────────────────

FAULTS: list[tuple[list[Any], list[str]]] = [
    ([stashes("foo")], ["no module declared 'foo' as poppable but stashed"]),
    ([pops("foo")], ["'0' declared 'foo' as poppable but it was not stashed"]),
    (
        [stashes("foo"), stashes("foo"), pops("foo")],
        ["'1' redeclared 'foo' as stashable but not isolated by namespace"],
    ),
    ([stashes("foo"), pops("foo"), pops("foo")], ["'2' redeclared 'foo' as poppable but not isolated by namespace"]),
    ([idle(stash=["foo"], pop=["foo"])], ["'0' declared 'foo' both as stashable and as poppable"]),
    (
        [pops("foo"), stashes("foo")],
        [
            "'0' declared 'foo' as poppable but it was not stashed",
            "no module declared 'foo' as poppable but stashed",
        ],
    ),
    (
        [stashes("foo"), pops("bar")],
        [
            "no module declared 'foo' as poppable but stashed",
            "'1' declared 'bar' as poppable but it was not stashed",
        ],
    ),
]


@pytest.mark.parametrize(("layers", "faults"), FAULTS)
def test_one_error_lists_all_unmatched_skips(layers: list[Any], faults: list[str]) -> None:
    for check in (verify_skippables, lambda module: GPipe(module, [len(module)], devices=["cpu"])):
        with pytest.raises(TypeError) as raised:
            check(nn.Sequential(*layers))
        head, *told = str(raised.value).split("\n\n")
        assert head == "one or more pairs of stash and pop do not match:"
        assert sorted(told[0].split("\n")) == sorted(f"* {fault}" for fault in faults)


def test_matching_skips() -> None:
    ns = Namespace()
    verify_skippables(nn.Sequential(stashes("foo"), stashes("bar"), pops("foo"), pops("bar")))
    verify_skippables(nn.Sequential(stashes("foo"), stashes("foo").isolate(ns), pops("foo").isolate(ns), pops("foo")))
    verify_skippables(nn.Sequential(stashes("foo"), pops("foo"), stashes("foo").isolate(ns), pops("foo").isolate(ns)))
