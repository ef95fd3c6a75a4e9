"""torchgpipe's ``GPipe``: what its users see of it, beside its results."""

from __future__ import annotations

import copy
import pickle
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.compat.torchgpipe import GPipe, current_microbatch, is_checkpointing, is_recomputing
from penstock.compat.torchgpipe.gpipe import verify_module
from tests.support.models import assert_same, batch, mlp, penstock_threads, threads_end


class Fn(nn.Module):
    """A layer that does what a function says."""

    def __init__(self, fn: Callable[[Any], Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Any) -> Any:
        return self.fn(x)


def linears(count: int = 2) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(1, 1) for _ in range(count)))


def on_cpu(module: nn.Sequential, balance: list[int] | None = None, **options: Any) -> GPipe:
    balance = [1] * len(module) if balance is None else balance
    return GPipe(module, balance, devices=["cpu"] * len(balance), **options)


# ── attributes ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_attributes_are_of_plain_kinds() -> None:
    class Word:
        def __str__(self) -> str:
            return "always"

    model = GPipe(linears(1), balance=(1,), devices=("cpu",), chunks=42.0, checkpoint=Word())  # type: ignore[arg-type]
    assert (model.balance, model.devices) == ([1], [torch.device("cpu")])
    assert (type(model.chunks), model.chunks) == (int, 42)
    assert (type(model.checkpoint), model.checkpoint) == (str, "always")


def test_devices_that_are_not_needed_are_left_out() -> None:
    assert GPipe(linears(3), [1, 2], devices=["cpu"] * 5).devices == [torch.device("cpu")] * 2


@pytest.mark.parametrize("balance", [[3], [1, 2], [2, 1], [1, 1, 1]])
def test_sequence_of_layers(balance: list[int]) -> None:
    module = linears(3)
    layers = list(module)
    model = on_cpu(module, balance)
    assert len(model) == 3
    assert list(model) == layers
    assert [model[i] for i in (0, 1, 2, -1, -2, -3)] == [*layers, *reversed(layers)]
    for index in (3, -4):
        with pytest.raises(IndexError):
            model[index]


def test_partitions_hold_the_layers_under_their_names() -> None:
    module = nn.Sequential(OrderedDict(a=nn.Linear(1, 1), b=nn.BatchNorm1d(1)))
    a, b = module
    model = on_cpu(module)
    assert isinstance(model.partitions, nn.ModuleList)
    assert all(type(part) is nn.Sequential for part in model.partitions)
    assert model.partitions[0].a is a
    assert model.partitions[1].b is b
    assert set(model.state_dict()) == {
        *("partitions.0.a.weight", "partitions.0.a.bias", "partitions.1.b.weight", "partitions.1.b.bias"),
        *(f"partitions.1.b.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")),
    }
    with pytest.raises(AttributeError):
        _ = model.a


def test_an_empty_module_is_the_identity() -> None:
    model = GPipe(nn.Sequential(), [])
    x = torch.tensor([42])
    assert model(x) is x
    assert model((x,)) == (x,)
    assert len(model) == 0
    with pytest.raises(TypeError, match="expected Tensor, but got int"):
        model(42)


def test_devices_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert GPipe(linears(3), [1, 1, 1]).devices == [torch.device("cpu")] * 3


def test_partitions_share_gpus_with_a_warning_where_there_are_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(nn.Sequential, "to", lambda self, device: self)
    with pytest.warns(UserWarning, match="3 partitions share 2 GPUs"):
        model = GPipe(linears(3), [1, 1, 1])
    assert [str(device) for device in model.devices] == ["cuda:0", "cuda:1", "cuda:0"]


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────────

RECOMMENDED = r"[\s\S]*torchgpipe\.balance[\s\S]*balance_by_time"


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"balance": None}, ValueError, "balance is required" + RECOMMENDED),
        ({"balance": [1]}, ValueError, r"different length \(module: 2, sum of balance: 1\)" + RECOMMENDED),
        ({"balance": [3]}, ValueError, r"different length \(module: 2, sum of balance: 3\)" + RECOMMENDED),
        ({"balance": [0, 2]}, ValueError, r"must be positive integer \(balance: \[0, 2\]\)" + RECOMMENDED),
        ({"balance": [-1, 3]}, ValueError, r"must be positive integer \(balance: \[-1, 3\]\)" + RECOMMENDED),
        ({"chunks": 0}, ValueError, "number of chunks must be positive integer"),
        ({"chunks": -1}, ValueError, "number of chunks must be positive integer"),
        ({"checkpoint": "no"}, ValueError, "checkpoint is not one of 'always', 'except_last', or 'never'"),
        ({"devices": ["cpu"]}, IndexError, r"too few devices to hold given partitions \(devices: 1, partitions: 2\)"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        GPipe(linears(), **{"balance": [1, 1], "devices": ["cpu", "cpu"], **options})


def test_error_of_a_module_that_is_not_sequential() -> None:
    with pytest.raises(TypeError, match=r"module must be nn\.Sequential to be partitioned"):
        GPipe(nn.Linear(1, 1), [1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="non-sequential module cannot be partitioned"):
        verify_module(nn.Linear(1, 1))  # type: ignore[arg-type]


def test_duplicate_children_and_parameters_are_refused() -> None:
    layer = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="module with duplicate children is not supported"):
        GPipe(nn.Sequential(layer, layer), [1, 1])
    tied = nn.Sequential(nn.Sequential(layer), nn.Sequential(layer))
    with pytest.raises(ValueError, match="module with duplicate parameters in distinct children is not supported"):
        GPipe(tied, [1, 1])
    model = on_cpu(nn.Sequential(nn.Sequential(layer, layer), nn.Linear(1, 1)))  # in one child it may
    assert_same(model(torch.ones(2, 1)), nn.Sequential(*model)(torch.ones(2, 1)))


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.cuda(),
        lambda model: model.cuda(0),
        lambda model: model.cpu(),
        lambda model: model.to(torch.device("cpu")),
        lambda model: model.to(0),
        lambda model: model.to("cpu", torch.half),
        lambda model: model.to(device="cpu"),
        lambda model: model.to(torch.rand(1)),
        lambda model: model.to(tensor=torch.rand(1)),
    ],
)
def test_moving_is_denied(move: Callable[[GPipe], Any]) -> None:
    with pytest.raises(TypeError, match="denied to move parameters and buffers, because GPipe should manage device"):
        move(on_cpu(linears()))


def test_casts() -> None:
    model = on_cpu(mlp(2))
    for cast in (lambda: model.double(), lambda: model.to(torch.bfloat16), lambda: model.to(dtype=torch.float64)):
        cast()
        kind = model[0].weight.dtype
        assert model(batch().to(kind)).dtype is kind


@pytest.mark.parametrize("value", ["hello", 42, [torch.ones(1, 1)], {"x": torch.ones(1, 1)}, (torch.ones(1, 1), "no")])
def test_inputs_are_tensors_or_tuples_of_them(value: Any) -> None:
    with pytest.raises(TypeError, match=r"expected Tensor, but got (str|int|list|dict)"):
        on_cpu(linears())(value)


@pytest.mark.parametrize("make", [lambda x: "hello", lambda x: (x, "hello"), lambda x: {"x": x}])
def test_outputs_are_tensors_or_tuples_of_them(make: Callable[[Tensor], Any]) -> None:
    with pytest.raises(TypeError, match=r"expected Tensor, but got (str|dict)"):
        on_cpu(nn.Sequential(nn.Linear(1, 1), Fn(make)))(torch.ones(1, 1))


def test_several_inputs_are_refused() -> None:
    with pytest.raises(TypeError, match="positional argument"):
        on_cpu(linears())(torch.ones(1, 1), torch.ones(1, 1))


class Boom(Exception):
    pass


def raising(x: Tensor) -> Tensor:
    raise Boom


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_layers_exception_comes_out_as_it_is_and_the_next_call_works(place: int) -> None:
    fault = Fn(raising)
    model = on_cpu(nn.Sequential(*(fault if i == place else nn.Linear(1, 1) for i in range(3))), chunks=3)
    with pytest.raises(Boom):
        model(torch.rand(3, 1))
    fault.fn = torch.neg
    model(torch.rand(3, 1)).sum().backward()


def test_partitions_before_the_one_that_failed_stop_soon() -> None:
    calls: list[int] = []

    def slow(x: Tensor) -> Tensor:
        time.sleep(0.2)
        calls.append(1)
        return x

    model = on_cpu(nn.Sequential(nn.Identity(), nn.Identity(), Fn(slow), Fn(raising)), chunks=5)
    with pytest.raises(Boom):
        model(torch.rand(5))
    assert len(calls) <= 2


def test_a_partition_starts_its_next_forward_when_its_last_output_is_taken() -> None:
    """GPipe's clock: 0! 1!   2!     outputs do not pile up before a slow partition
    000! 111! 222!
    """
    log: list[tuple[int, int]] = []

    def layer(j: int, seconds: float) -> nn.Module:
        calls = iter(range(100))

        def run(x: Tensor) -> Tensor:
            time.sleep(seconds)
            log.append((j, next(calls)))
            return x

        return Fn(run)

    model = on_cpu(nn.Sequential(layer(0, 0.0), layer(1, 0.15)), chunks=3)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            model(torch.rand(3, 1))
        assert [j for j, _ in log] == [0, 0, 1, 0, 1, 1]
        log.clear()


GLOBAL: Tensor | None = None


class Writes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        global GLOBAL
        GLOBAL = x
        return x


class Reads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        assert GLOBAL is not None
        return x + GLOBAL


COUNT = 0


class Counts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        global COUNT
        COUNT += 1
        return x


def test_a_global_variable_between_partitions_is_found_before_anything_runs() -> None:
    def module() -> nn.Sequential:
        return nn.Sequential(nn.Linear(1, 1), Writes(), nn.Sequential(nn.Linear(1, 1), Reads()))

    text = r"(?s)Reads in partition 1 reads the global variable 'GLOBAL', which Writes in partition 0 sets.*skippable"
    with pytest.raises(ps.PlanError, match=text):
        on_cpu(module(), [2, 1])
    on_cpu(module(), [1, 2])  # within a partition it is nobody's business
    on_cpu(nn.Sequential(Counts(), Counts()))  # and a counter hands nothing over


# ── modes, copies, threads ───────────────────────────────────────────────────────────────────────────────────────


def flags_of(model_of: Callable[[nn.Sequential], GPipe], mode: bool) -> list[tuple[bool, bool]]:
    seen: list[tuple[bool, bool]] = []

    def look(x: Tensor) -> Tensor:
        seen.append((is_checkpointing(), is_recomputing()))
        return x

    model = model_of(nn.Sequential(nn.Linear(1, 1), Fn(look))).train(mode)
    model(torch.rand(3, 1)).sum().backward()
    return seen


FIRST, AGAIN, ONCE = (True, False), (False, True), (False, False)


@pytest.mark.parametrize(
    ("checkpoint", "chunks", "expected"),
    [
        ("always", 3, [FIRST] * 3 + [AGAIN] * 3),
        ("except_last", 3, [FIRST] * 2 + [ONCE] + [AGAIN] * 2),
        ("never", 3, [ONCE] * 3),
        ("always", 1, [FIRST, AGAIN]),
        ("except_last", 1, [ONCE]),
        ("except_last", 8, [FIRST] * 2 + [ONCE] + [AGAIN] * 2),  # of three samples; in torchgpipe all would run again
    ],
)
def test_recomputed_forwards_by_checkpoint_mode(
    checkpoint: str, chunks: int, expected: list[tuple[bool, bool]]
) -> None:
    def model(module: nn.Sequential) -> GPipe:
        return on_cpu(module, chunks=chunks, checkpoint=checkpoint)

    assert flags_of(model, True) == expected
    assert flags_of(model, False) == [ONCE] * min(chunks, 3)


def test_chunks_and_checkpoint_may_be_changed_between_calls() -> None:
    sizes: list[int] = []

    def look(x: Tensor) -> Tensor:
        sizes.append(-len(x) if is_recomputing() else len(x))
        return x

    model = on_cpu(nn.Sequential(nn.Linear(1, 1), Fn(look)), chunks=2, checkpoint="never")
    early = model(torch.rand(4, 1)).sum()
    model.chunks, model.checkpoint = 1, "always"
    model(torch.rand(4, 1)).sum().backward()
    early.backward()
    assert sizes == [2, 2, 4, -4]


def nodes(node: Any, seen: set[Any]) -> list[str]:
    if node is None or node in seen:
        return []
    seen.add(node)
    return [type(node).__name__, *(name for other, _ in node.next_functions for name in nodes(other, seen))]


@pytest.mark.parametrize(("checkpoint", "count"), [("always", 2), ("except_last", 1), ("never", 0)])
def test_checkpoint_nodes_in_the_autograd_graph(checkpoint: str, count: int) -> None:
    model = on_cpu(linears(), chunks=2, checkpoint=checkpoint)
    output = model(torch.rand(2, 1))  # which keeps its graph alive, before torch 2.13
    assert nodes(output.grad_fn, set()).count("CheckpointBackward") == count
    output = model.eval()(torch.rand(2, 1))
    assert "CheckpointBackward" not in nodes(output.grad_fn, set())


def test_the_output_may_be_changed_in_place() -> None:
    model = on_cpu(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), chunks=2, checkpoint="always")
    plain = copy.deepcopy(nn.Sequential(*model))
    (plain(batch()) * 2).square().sum().backward()
    model(batch()).mul_(2).square().sum().backward()
    assert_same(model[0].weight.grad, plain[0].weight.grad)


def test_hooks_on_partitions_and_layers_run() -> None:
    model = on_cpu(linears(), chunks=2)
    seen: list[tuple[str, bool]] = []
    model.partitions[0].register_forward_hook(lambda m, i, o: seen.append(("partition", o.requires_grad)))
    model[1].register_forward_pre_hook(lambda m, i: seen.append(("layer", i[0].requires_grad)))
    with torch.no_grad():
        model(torch.rand(2, 1))
    assert sorted(seen) == [("layer", False)] * 2 + [("partition", False)] * 2


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copy_and_pickle(again: Callable[[GPipe], GPipe], after: bool) -> None:
    torch.manual_seed(0)
    model = on_cpu(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)), chunks=2, checkpoint="always")
    if after:
        model(batch()).sum().backward()
        model.zero_grad()
    twin = again(model)
    assert_same(twin.state_dict(), model.state_dict())
    twin(batch()).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in twin.parameters())


def test_threads_end_with_the_module() -> None:
    before = penstock_threads()
    model = on_cpu(linears())
    model(torch.rand(2, 1)).sum().backward()
    mine = penstock_threads() - before
    assert len(mine) == 2
    del model
    assert threads_end(mine)


def test_any_number_of_samples() -> None:
    model = on_cpu(mlp(2), [2, 1], chunks=4)
    plain = nn.Sequential(*model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for samples in (1, 2, 3, 4, 7, 9):
            assert_same(model(batch(samples)), plain(batch(samples)))
    with pytest.raises(ps.PlanError, match="the mini-batch is empty"):
        model(batch(0))


def test_nested_tuples() -> None:
    """torchgpipe lets them in, and fails."""
    swaps = nn.Sequential(*(Fn(lambda pair: ((pair[1],), pair[0][0])) for _ in range(2)))
    model = on_cpu(swaps, chunks=3, checkpoint="always")
    value = ((batch(8).requires_grad_(),), batch(8, seed=5))
    output = model(value)
    assert_same(output, value)
    output[0][0].sum().backward()
    assert_same(value[0][0].grad, torch.ones(8, 4))


def test_tuples_whose_tensors_disagree_on_the_number_of_samples_are_refused() -> None:
    """torchgpipe drops what is too much: of 8 and 4 samples, 4 come out."""
    with pytest.raises(ps.PlanError, match="disagree on the batch size"):
        on_cpu(nn.Sequential(Fn(sum)), chunks=4)((torch.rand(8, 1), torch.rand(4, 1)))


# ── current_microbatch ───────────────────────────────────────────────────────────────────────────────────────────


def test_the_current_micro_batch_is_a_tensor_for_all_layers_and_none_outside() -> None:
    seen: list[list[Any]] = [[], []]

    def layer(row: list[Any]) -> nn.Module:
        def ask(x: Tensor) -> Tensor:
            row.append(current_microbatch())
            return x

        return Fn(ask)

    assert current_microbatch() is None
    model = on_cpu(nn.Sequential(layer(seen[0]), layer(seen[1])), chunks=3, checkpoint="never")
    model(torch.rand(3))
    assert all(isinstance(key, Tensor) for key in seen[0])
    assert len({id(key) for key in seen[0]}) == 3
    assert [id(key) for key in seen[0]] == [id(key) for key in seen[1]]
    assert current_microbatch() is None


@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
def test_current_microbatch_is_refused_under_recomputation(checkpoint: str) -> None:
    model = on_cpu(nn.Sequential(Fn(lambda x: (current_microbatch(), x)[1])), chunks=2, checkpoint=checkpoint)
    with pytest.raises(RuntimeError, match=r"checkpoint='never'.*skippable"):
        model(torch.rand(2))
    model.eval()(torch.rand(2))
