"""Ranks without the inputs run the recordings that the inputs ask for."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock as ps
from tests.support.ranks import Ranks

pytestmark = pytest.mark.slow


class Asks(nn.Module):
    """The path of its forward depends on its inputs: on their shapes, and on their values."""

    def __init__(self, mask: bool = True) -> None:
        super().__init__()
        self.mask = mask
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        self.calls += 1
        first = self.layers[0](x) if x.sum() > 0 else -self.layers[0](x)
        h = self.layers[1](first)
        for _ in range(1 + int(keep.sum())):
            h = self.layers[2](h)
        h = h + (first[keep] if self.mask else first).sum(0) / x.shape[1]
        return self.layers[3](h) * (1 if x.shape[1] > 3 else keep.sum().item())


def batches() -> list[tuple[Tensor, Tensor]]:
    """Mini-batches of new lengths, whose micro-batches keep different numbers of rows."""
    generator = torch.Generator().manual_seed(1)
    masks = [[True, False, True, True], [False, False, True, False], [True, True, True, True]]
    return [(torch.randn(4, length, 6, generator=generator), torch.tensor(mask))
            for length, mask in zip((3, 5, 3), masks, strict=True)]  # fmt: skip


def steps(pipe: ps.Pipeline, plain: nn.Module) -> None:
    """Compare losses, gradients and buffers of steps and evaluations."""
    for x, keep in batches():
        parts = [plain(*rows).square().mean() / 2 for rows in zip(x.chunk(2), keep.chunk(2), strict=True)]
        expected = torch.stack(parts).sum()
        expected.backward()
        torch.testing.assert_close(pipe.step((x, keep)).loss, expected.detach())
        own = dict(plain.named_parameters())
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, own[name].grad)
            parameter.grad = own[name].grad = None
        torch.testing.assert_close(pipe.evaluate((x, keep)).loss, expected.detach())
        plain.calls += 2  # by the evaluation
        assert pipe.state_dict(full=pipe.mesh is not None)["calls"] == plain.calls


def on_rank(rank: int, with_sample: bool, mask: bool) -> None:
    torch.manual_seed(0)
    model = Asks(mask)
    plain = copy.deepcopy(model)
    x, keep = batches()[0]
    how = {"sample": (x[:2], keep[:2])} if with_sample else {}
    plan = ps.split(model, blocks="layers", stages=4, balance="uniform", **how)
    options = {"schedule": "interleaved", "mesh": ps.Mesh(), "dynamic": mask}  # the shape of x[mask] is not inferred
    with ps.Pipeline(plan, lambda out: out.square().mean(), microbatches=2, **options) as pipe:
        steps(pipe, plain)


def test_steps_over_two_ranks(two: Ranks) -> None:
    for with_sample in (True, False):
        for mask in (True, False):
            two.check(on_rank, with_sample, mask)


def test_steps_in_threads() -> None:
    for schedule in ("1f1b", "gpipe", "interleaved", "zb_h1"):
        for recompute in ("never", "always"):
            torch.manual_seed(0)
            model = Asks()
            plain = copy.deepcopy(model)
            x, keep = batches()[0]
            plan = ps.split(model, blocks="layers", stages=4, balance="uniform", sample=(x[:2], keep[:2]))
            devices = ["cpu"] * (2 if schedule == "interleaved" else 4)
            options = {"schedule": schedule, "recompute": recompute, "devices": devices}
            with ps.Pipeline(plan, lambda out: out.square().mean(), microbatches=2, **options) as pipe:
                steps(pipe, plain)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x).tanh()).tanh() + x)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by Dynamo
@pytest.mark.parametrize("compiled", ["layer", "stage"])
def test_compiled_layers_and_stages(compiled: str) -> None:
    """A layer that is compiled before the split stays compiled, and a stage can be compiled."""
    model, x = Residual(), torch.randn(4, 6)
    plain = copy.deepcopy(model)
    expected = plain(x).square().mean()
    expected.backward()
    if compiled == "layer":
        model.second.compile(backend="aot_eager")
    with ps.Pipeline(ps.split(model, stages=2), lambda output: output.square().mean(), microbatches=2) as pipe:
        if compiled == "stage":
            for stage in pipe.stage_modules.values():
                stage.compile(backend="aot_eager")
        for _ in range(2):
            torch.testing.assert_close(pipe.step(x).loss, expected.detach())
            for name, parameter in pipe.named_parameters():
                torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)
            pipe.zero_grad()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x)).tanh()


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by Dynamo
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_the_pipeline_compiles_stages_or_the_modules_that_they_call(schedule: str) -> None:
    x = torch.randn(4, 6)
    for model in (Blocks(), nn.Sequential(Block(), Block(), nn.Linear(6, 6))):
        plain, plan = copy.deepcopy(model), ps.split(model, stages=2)
        loss_fn, options = (lambda output: output.square().mean()), {"microbatches": 2, "schedule": schedule}
        with ps.Pipeline(plan, loss_fn, compile={"backend": "aot_eager"}, **options) as pipe:
            parts = [part for stage in pipe.stage_modules.values() for part in stage.modules()]
            compiled = [type(part).__name__ for part in parts if part._compiled_call_impl is not None]
            assert compiled == (["Block"] * 4 if isinstance(model, Blocks) else ["Sequential"] * 2)
            for _ in range(2):
                expected = loss_fn(plain(x))
                expected.backward()
                torch.testing.assert_close(pipe.step(x).loss, expected.detach())
                for name, parameter in pipe.named_parameters():
                    torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)


@dataclass
class Outputs:
    logits: Tensor
    hidden: list[Tensor]


class Opaque:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class ReturnsObject(nn.Module):
    """Returns a dataclass of the user's, or an object whose tensors Penstock does not see."""

    def __init__(self, opaque: bool) -> None:
        super().__init__()
        self.opaque = opaque
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Outputs | Opaque:
        hidden = list(accumulate(self.layers, lambda h, layer: layer(h).tanh(), initial=x))
        return Opaque(hidden[-1]) if self.opaque else Outputs(hidden[-1], hidden[:-1])


def object_on_rank(rank: int) -> None:
    for opaque in (False, True):
        torch.manual_seed(0)
        last, x = ReturnsObject(opaque), torch.randn(4, 6)
        model = nn.Sequential(nn.Linear(6, 6), last) if opaque else last
        plain = copy.deepcopy(model)
        expected = plain(x).logits.square().mean()
        expected.backward()
        for mesh in (None, ps.Mesh()):
            plan = ps.split(model, stages=2)
            with ps.Pipeline(plan, lambda out: out.logits.square().mean(), microbatches=2, mesh=mesh) as pipe:
                result = pipe.step(x)
                torch.testing.assert_close(result.loss, expected.detach())
                for name, parameter in pipe.named_parameters():
                    torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad, msg=name)
                if pipe.has_last_stage and not opaque:
                    torch.testing.assert_close(result.outputs.logits, plain(x).logits.detach())
                    assert [tuple(h.shape) for h in result.outputs.hidden] == [(4, 6)] * 3
                pipe.zero_grad()


def test_outputs_in_an_object_give_gradients_to_all_ranks(two: Ranks) -> None:
    """The tensors in a dataclass were not seen, so the rank before got no gradient, without an error."""
    two.check(object_on_rank)


class CountsClasses(nn.Module):
    """Fake tensors cannot compute bincount and ctc_loss, although their shapes do not depend on data here."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        self.seen += torch.bincount(labels.flatten(), minlength=6)
        lengths = [torch.full((len(x),), size) for size in (x.shape[1], labels.shape[1])]
        return F.ctc_loss(x.log_softmax(-1).transpose(0, 1), labels, *lengths, reduction="none")


def counts_on_rank(rank: int) -> None:
    torch.manual_seed(0)
    model, x, labels = CountsClasses(), torch.randn(4, 8, 6), torch.randint(1, 6, (4, 2))
    plain = copy.deepcopy(model)
    expected = plain(x, labels).mean()
    expected.backward()
    plan, options = ps.split(model, stages=2), {"reduction": "mean", "mesh": ps.Mesh()}
    with ps.Pipeline(plan, lambda losses: losses.mean(), microbatches=2, **options) as pipe:
        torch.testing.assert_close(pipe.step((x, labels)).loss, expected.detach())
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)
        assert torch.equal(pipe.state_dict(full=True)["seen"], plain.seen)


def test_functions_that_fake_tensors_cannot_compute(two: Ranks) -> None:
    two.check(counts_on_rank)


class Experts(nn.Module):
    """The kernel of transformers' experts, whose meta function refuses single precision."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch._grouped_mm(x, self.weight, offs=torch.tensor([1, len(x)], dtype=torch.int32))


def experts_on_rank(rank: int) -> None:
    logged: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = logged.append  # type: ignore[method-assign]
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(handler)
    torch.manual_seed(0)
    model, x = nn.ModuleList([nn.Linear(8, 8), Experts(), Experts()]), torch.randn(4, 8)
    model.forward = lambda x: model[2](model[1](model[0](x)))
    expected = model(x).square().mean()
    try:
        plan = ps.split(model, cuts=["2"])
        options = {"reduction": "mean", "mesh": ps.Mesh()}
        with ps.Pipeline(plan, lambda out: out.square().mean(), microbatches=1, **options) as pipe:
            torch.testing.assert_close(pipe.step(x).loss, expected.detach())
    finally:
        logger.removeHandler(handler)
    assert not logged


def test_operators_that_fake_tensors_refuse_are_not_logged(two: Ranks) -> None:
    two.check(experts_on_rank)
