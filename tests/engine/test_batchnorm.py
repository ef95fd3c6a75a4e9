"""Deferred BatchNorm has the running statistics of one forward of the whole mini-batch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.engine.recompute.batchnorm import DeferredStatistics, commit_statistics
from penstock.errors import PlanError

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 1e-2, torch.float16: 1e-3}

LAYERS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    "1d": (nn.BatchNorm1d, (3,)),
    "1d of sequences": (nn.BatchNorm1d, (3, 5)),
    "2d": (nn.BatchNorm2d, (3, 4, 2)),
    "3d": (nn.BatchNorm3d, (3, 2, 2, 3)),
}


def values(batch: int, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Samples that differ in mean and spread from each other, so that micro-batches do, too."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, *shape, generator=generator, dtype=torch.float64)
    own = torch.arange(1, batch + 1, dtype=torch.float64).view(-1, *[1] * len(shape))
    return (x * own + own).to(dtype)


def run(
    module: nn.Module, x: Tensor, sizes: Sequence[int], deferred: DeferredStatistics | None = None
) -> tuple[Tensor, ...]:
    """One step's forwards, micro-batch by micro-batch, each run a second time as recompute does; the outputs."""
    deferred = deferred or DeferredStatistics(module)
    outputs = []
    with commit_statistics([deferred]):
        for part in x.split(list(sizes)):
            with deferred.counting:
                outputs.append(module(part))
            with deferred.ignoring:
                assert torch.equal(module(part), outputs[-1])
    return tuple(outputs)


def same(ours: nn.Module, plain: nn.Module, tolerance: float) -> None:
    state = plain.state_dict()
    assert list(ours.state_dict()) == list(state)
    for name, tensor in ours.state_dict().items():
        torch.testing.assert_close(tensor, state[name], rtol=tolerance, atol=tolerance, msg=f"{name}: {{}}".format)


# ── one layer ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("momentum", [0.1, 0.7, 1.0, 0.0, None])
@pytest.mark.parametrize("kind", LAYERS)
def test_three_steps_equal_three_forwards_of_the_whole(kind: str, momentum: float | None, dtype: torch.dtype) -> None:
    make, shape = LAYERS[kind]
    ours = make(3, momentum=momentum, dtype=dtype)
    plain = copy.deepcopy(ours)
    deferred = DeferredStatistics(ours)
    for step, sizes in enumerate([(3, 3, 2), (2, 2), (8,)]):  # uneven, fewer, one
        x = values(sum(sizes), *shape, dtype=dtype, seed=step)
        run(ours, x, sizes, deferred)
        plain(x)
    same(ours, plain, TOLERANCE[dtype])
    assert int(ours.num_batches_tracked) == 3


def test_one_sample_per_micro_batch() -> None:
    ours = nn.BatchNorm2d(3)
    plain = copy.deepcopy(ours)
    x = values(5, 3, 2, 2)
    run(ours, x, [1] * 5)
    plain(x)
    same(ours, plain, 1e-5)


def test_many_micro_batches() -> None:
    ours = nn.BatchNorm1d(3, dtype=torch.float64)
    plain = copy.deepcopy(ours)
    x = values(100, 3, dtype=torch.float64)
    deferred = DeferredStatistics(ours)
    sizes = [2, 3] * 20
    with commit_statistics([deferred]):
        for part in x.split(sizes):
            with deferred.counting:
                ours(part)
        plain(x)
    same(ours, plain, 1e-12)


def test_outputs_are_those_of_a_loop_over_micro_batches() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for affine in (True, False):
            # Statistics in single precision beside half-precision values: torch has a kernel of its own for that.
            ours = nn.BatchNorm2d(3, affine=affine)
            plain = copy.deepcopy(ours)
            x = values(7, 3, 2, 2, dtype=dtype)
            sizes = [3, 2, 2]
            for output, part in zip(run(ours, x, sizes), x.split(sizes), strict=True):
                assert torch.equal(output, plain(part))


def test_gradients_are_those_of_a_loop_over_micro_batches() -> None:
    ours = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    plain = copy.deepcopy(ours)
    x = values(9, 3)
    for output in run(ours, x, [4, 3, 2]):
        output.square().sum().backward()
    for part in x.split([4, 3, 2]):
        plain(part).square().sum().backward()
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("shape", [(3,), (3, 5), (3, 2, 2)])
def test_large_means_keep_the_variance(shape: tuple[int, ...]) -> None:
    """1e8, the square of a value, has no room for a variance of 1; and 1e4 has three digits for how means differ."""
    noise = values(64, *shape, dtype=torch.float64).div_(40)
    x = (noise + 1e4).float()
    reference = x.double().movedim(1, -1).reshape(-1, 3)
    ours = (nn.BatchNorm2d if len(shape) == 3 else nn.BatchNorm1d)(3, momentum=1.0)
    run(ours, x, [2] * 30 + [4])
    torch.testing.assert_close(ours.running_mean.double(), reference.mean(0), rtol=1e-7, atol=0)
    torch.testing.assert_close(ours.running_var.double(), reference.var(0), rtol=2e-6, atol=0)


def test_large_micro_batches_are_reduced_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.recompute.batchnorm._CHUNK", 40)
    ours = nn.BatchNorm2d(3, dtype=torch.float64)
    plain = copy.deepcopy(ours)
    for width in (2, 10):  # 12 and 60 values a sample: slabs of three samples, and of one
        x = values(11, 3, 2, width, dtype=torch.float64)
        run(ours, x, [7, 4])
        plain(x)
    same(ours, plain, 1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_single(dtype: torch.dtype) -> None:
    x = (values(96, 3, dtype=torch.float64).div_(40) + 8).to(dtype)
    ours = nn.BatchNorm1d(3, momentum=1.0)  # statistics in single precision
    run(ours, x, [32, 32, 32])
    torch.testing.assert_close(ours.running_mean.double(), x.double().mean(0), rtol=1e-6, atol=0)
    torch.testing.assert_close(ours.running_var.double(), x.double().var(0), rtol=1e-5, atol=0)


def test_autocast() -> None:
    ours = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    plain = copy.deepcopy(ours)
    x = values(12, 3)
    with torch.autocast("cpu", torch.bfloat16):
        run(ours, x, [5, 4, 3])
        plain(x)
    same(ours, plain, 1e-5)


def test_the_order_of_micro_batches_does_not_matter() -> None:
    x = values(12, 3, dtype=torch.float64)
    parts = list(x.split([2, 5, 3, 2]))
    found = []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        layer = nn.BatchNorm1d(3, dtype=torch.float64)
        run(layer, torch.cat([parts[i] for i in order]), [len(parts[i]) for i in order])
        found.append(layer)
    same(*found, 1e-13)


def test_empty_micro_batches_have_no_weight() -> None:
    for sizes in ([3, 0, 2], [0, 0]):
        ours = nn.BatchNorm2d(3)
        plain = copy.deepcopy(ours)
        x = values(sum(sizes), 3, 2, 2)
        run(ours, x, sizes)
        plain(x)
        same(ours, plain, 1e-5)


# ── layers that do not update, or update otherwise ───────────────────────────────────────────────────────────────


def test_layers_in_evaluation_mode_use_their_statistics_and_keep_them() -> None:
    ours = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    ours(values(8, 3, seed=5))
    ours[0].eval()  # frozen; the other one trains
    plain = copy.deepcopy(ours)
    x = values(6, 3)
    outputs = run(ours, x, [3, 3])
    same(ours[0], plain[0], 0)
    assert int(ours[1].num_batches_tracked) == 2
    assert torch.equal(outputs[0], plain(x[:3]))
    plain.load_state_dict(ours.state_dict())
    ours.eval()
    plain.eval()
    assert torch.equal(torch.cat(run(ours, x, [3, 3])), plain(x))
    same(ours, plain, 0)


@pytest.mark.parametrize("options", [{"track_running_stats": False}, {"affine": False}])
def test_layers_without_statistics_or_parameters(options: dict[str, Any]) -> None:
    ours = nn.BatchNorm1d(3, **options)
    plain = copy.deepcopy(ours)
    x = values(7, 3)
    run(ours, x, [4, 3])
    plain(x)
    same(ours, plain, 1e-5)


def test_a_layer_whose_tracking_was_switched_off() -> None:
    ours = nn.BatchNorm1d(3)
    ours.track_running_stats = False
    before = copy.deepcopy(ours)
    run(ours, values(7, 3), [4, 3])
    same(ours, before, 0)


def test_a_lazy_layer_that_has_been_initialised() -> None:
    ours = nn.LazyBatchNorm2d()
    ours(values(2, 3, 2, 2))
    plain = copy.deepcopy(ours)
    x = values(7, 3, 2, 2, seed=1)
    run(ours, x, [4, 3])
    plain(x)
    same(ours, plain, 1e-5)


def test_a_layer_called_twice_is_updated_twice_in_order() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3, momentum=None)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x) + self.norm(5 - x * x)  # the second call's values do not depend on statistics

    ours = Twice()
    plain = copy.deepcopy(ours)
    deferred = DeferredStatistics(ours)
    for step in range(2):
        x = values(7, 3, seed=step)
        run(ours, x, [3, 2, 2], deferred)
        plain(x)
    same(ours, plain, 1e-5)
    assert int(ours.norm.num_batches_tracked) == 4
    for _ in range(2):  # with a number, the order shows
        ours.norm.momentum = plain.norm.momentum = 0.3
        run(ours, x, [3, 2, 2], deferred)
        plain(x)
    same(ours, plain, 1e-5)


def test_a_layer_of_two_stages_is_updated_in_the_order_of_the_stages() -> None:
    norm = nn.BatchNorm1d(3, momentum=0.3)
    plain = copy.deepcopy(norm)
    first, second = nn.Sequential(norm), nn.Sequential(nn.Tanh(), norm)
    stages = [DeferredStatistics(first), DeferredStatistics(second)]
    x, y = values(6, 3), values(6, 3, seed=1)
    with commit_statistics(stages):
        for a, b in zip(x.split(2), y.split(2), strict=True):
            with stages[1].counting:
                second(b)
            with stages[0].counting:
                first(a)
    plain(x)
    plain(y.tanh())
    same(norm, plain, 1e-5)


class Last(nn.BatchNorm1d):
    """Channels come last: what is normalised is not what the layer is given. It looks at its counter, too."""

    counts: list[int]

    def forward(self, x: Tensor) -> Tensor:
        assert self.num_batches_tracked is not None
        self.counts = [*getattr(self, "counts", []), int(self.num_batches_tracked)]
        return super().forward(x.transpose(1, -1)).transpose(1, -1).relu()


class Spelt(nn.BatchNorm2d):
    """torch's forward written out, as some model libraries have it, over the functions below it."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        if not self.training:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        self.num_batches_tracked.add_(1)
        mean, var, factor = self.running_mean, self.running_var, self.momentum
        return torch.batch_norm(x, self.weight, self.bias, mean, var, True, factor, self.eps, False)


def test_layers_with_a_forward_of_their_own() -> None:
    for ours, x in ((Last(3), values(7, 5, 3)), (Spelt(3), values(7, 3, 2, 2))):
        plain = copy.deepcopy(ours)
        run(ours, x, [4, 3])
        plain(x)
        same(ours, plain, 1e-5)
        ours.eval()
        plain.load_state_dict(ours.state_dict())
        plain.eval()
        assert torch.equal(torch.cat(run(ours, x, [7])), plain(x))
        if isinstance(ours, Last):
            assert ours.counts[:4] == [0] * 4  # of every micro-batch, first run and second


def test_a_forward_put_on_the_layer_itself() -> None:
    ours = nn.BatchNorm1d(3)
    plain = copy.deepcopy(ours)
    ours.forward = lambda x: nn.BatchNorm1d.forward(ours, x * 2)  # type: ignore[method-assign]
    x = values(7, 3)
    run(ours, x, [4, 3])
    plain(x * 2)
    same(ours, plain, 1e-5)


class Writes(nn.BatchNorm1d):
    """Updates its statistics by hand, in one of three ways."""

    way = ""

    def forward(self, x: Tensor) -> Tensor:
        assert self.running_mean is not None
        if self.way == "in place":
            self.running_mean.lerp_(x.mean(0).detach(), 0.1)
        elif self.way == "data":
            self.running_mean.data.copy_(x.mean(0))
        elif self.way == "another tensor":
            self.running_mean = self.running_mean * 0.9 + 0.1 * x.mean(0).detach()
        return x - self.running_mean


@pytest.mark.parametrize("way", ["in place", "data", "another tensor"])
def test_statistics_written_by_hand_are_refused_and_left_alone(way: str) -> None:
    model = nn.Sequential(Writes(3), nn.BatchNorm1d(3))
    before = copy.deepcopy(model)
    run(model, values(4, 3), [2, 2])  # reading is fine
    same(model[0], before[0], 0)
    model.load_state_dict(before.state_dict())
    model[0].way = way
    with pytest.raises(PlanError, match=r"^0, a Writes, changes its running statistics by other means"):
        run(model, values(4, 3), [2, 2])
    same(model, before, 0)
    assert all(type(tensor) is Tensor for tensor in model.buffers())


def test_sync_batchnorm_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.SyncBatchNorm(3))
    with pytest.raises(PlanError, match=r"stage 2: 1 is a SyncBatchNorm.*batchnorm='microbatch'"):
        DeferredStatistics(model, 2)


def test_scripted_layers_are_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would rather have it compiled
        model = nn.Sequential(torch.jit.script(nn.BatchNorm1d(3)))
    with pytest.raises(PlanError, match=r"0 is a scripted BatchNorm1d"):
        DeferredStatistics(model)


# ── around a step ────────────────────────────────────────────────────────────────────────────────────────────────


def test_nothing_is_updated_before_the_step_is_over() -> None:
    layer = nn.BatchNorm1d(3)
    before = copy.deepcopy(layer)
    deferred = DeferredStatistics(layer)
    with commit_statistics([deferred]):
        for part in values(6, 3).split(2):
            with deferred.counting:
                layer(part)
            same(layer, before, 0)
    assert int(layer.num_batches_tracked) == 1


def test_a_step_that_fails_leaves_statistics_as_they_were() -> None:
    layer = nn.BatchNorm1d(3)
    before, plain = copy.deepcopy(layer), copy.deepcopy(layer)
    deferred = DeferredStatistics(layer)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        run(layer, values(5, 3), [2, 2, 1], deferred)
    same(layer, before, 0)
    assert not deferred.layers[0].calls  # nothing is held on to, either
    with pytest.raises(KeyboardInterrupt), commit_statistics([deferred]):
        _interrupted(layer, deferred)
    same(layer, before, 0)
    assert not deferred.layers[0].calls
    with deferred.counting:
        layer(values(5, 3))  # a forward of no step
    x = values(6, 3, seed=1)
    run(layer, x, [3, 3], deferred)  # and nothing of them is in the next step
    plain(x)
    same(layer, plain, 1e-5)


def _interrupted(layer: nn.Module, deferred: DeferredStatistics) -> None:
    with deferred.counting:
        layer(values(5, 3))
    raise KeyboardInterrupt


def test_a_micro_batch_that_fails_counts_for_nothing() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) == 3:
                raise RuntimeError("three")
            return x

    model = nn.Sequential(nn.BatchNorm1d(3), Fails())
    plain = copy.deepcopy(model)
    deferred = DeferredStatistics(model)
    x = values(7, 3)
    with commit_statistics([deferred]):
        with pytest.raises(RuntimeError, match="three"), deferred.counting:
            model(x[4:])
        with deferred.counting:
            model(x[:4])
    plain(x[:4])
    same(model, plain, 1e-5)


def test_modules_are_as_before_between_forwards() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), Last(3))
    deferred = DeferredStatistics(model)

    def look() -> list[Any]:
        return [[sorted(m.__dict__), dict(m._buffers), len(m._forward_pre_hooks), m.training] for m in model.modules()]

    model[1].counts = []
    before = look()
    buffers = list(model.buffers())
    with commit_statistics([deferred]):
        with deferred.counting:
            model(values(4, 3))
        assert str(look()) == str(before)
        assert all(a is b for a, b in zip(model.buffers(), buffers, strict=True))
    assert all(a is b for a, b in zip(model.buffers(), buffers, strict=True))


def test_hooks_see_the_layer_and_its_statistics() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3))
    model[0].running_mean.fill_(2)
    seen: list[Any] = []

    def hook(layer: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        seen.append((layer is model[0], (layer.running_mean * 2).tolist(), len(args[0])))

    model[0].register_forward_pre_hook(lambda layer, args: (args[0] * 3,))
    model[0].register_forward_hook(hook)
    plain = nn.BatchNorm1d(3)
    plain.running_mean.fill_(2)
    x = values(5, 3)
    run(model, x, [3, 2])
    plain(x * 3)
    same(model[0], plain, 1e-5)
    assert seen == [(True, [4.0] * 3, n) for n in (3, 3, 2, 2)]


def test_a_copy_made_within_a_forward_is_a_plain_module() -> None:
    copies: list[nn.Module] = []

    class Copies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            copies.append(copy.deepcopy(self.norm))
            return self.norm(x)

    model = Copies()
    plain = copy.deepcopy(model.norm)
    x = values(6, 3)
    run(model, x, [3, 3])
    for copied in copies:
        assert all(type(tensor) is Tensor for tensor in copied.buffers())
        copied(x)
    plain(x)
    same(model.norm, plain, 1e-5)  # the copies' calls are not among the model's
    assert copies[0].running_mean.abs().sum() > 0


def test_statistics_loaded_or_moved_between_steps() -> None:
    layer = nn.BatchNorm1d(3)
    plain = copy.deepcopy(layer)
    deferred = DeferredStatistics(layer)
    run(layer, values(6, 3), [3, 3], deferred)
    plain(values(6, 3))
    for module in (layer, plain):
        module.load_state_dict({name: tensor + 1 for name, tensor in module.state_dict().items()})
        module.double()
    x = values(6, 3, dtype=torch.float64, seed=1)
    run(layer, x, [3, 3], deferred)
    plain(x)
    same(layer, plain, 1e-5)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_calls_without_gradients_commit_as_the_plain_model_does(context: Callable[[], Any]) -> None:
    for ours in (nn.BatchNorm1d(3), Last(3)):
        plain = copy.deepcopy(ours)
        deferred = DeferredStatistics(ours)
        x = values(7, 3)
        with context():
            run(ours, x, [4, 3], deferred)
            plain(x)
        same(ours, plain, 1e-5)
        x.requires_grad_()
        run(ours, x, [4, 3], deferred)[0].sum().backward()  # and the layer still trains
        plain(x)
        same(ours, plain, 1e-5)


def test_of_nested_contexts_the_innermost_decides() -> None:
    layer = nn.BatchNorm1d(3)
    plain = copy.deepcopy(layer)
    deferred = DeferredStatistics(layer)
    x = values(6, 3)
    with commit_statistics([deferred]), deferred.counting:
        layer(x)
        with deferred.ignoring, deferred.ignoring:
            layer(x * 100)
    plain(x)
    same(layer, plain, 1e-5)
    assert type(layer.running_mean) is Tensor


def test_nested_checkpoints_do_not_count_again() -> None:
    from torch.utils.checkpoint import checkpoint

    layer = nn.BatchNorm1d(3)
    plain = copy.deepcopy(layer)
    deferred = DeferredStatistics(layer)
    x = values(6, 3).requires_grad_()
    with commit_statistics([deferred]):
        for part in x.split(3):
            with deferred.counting:
                output = checkpoint(layer, part, use_reentrant=False)
            with deferred.ignoring:  # as around B: the checkpointed layer runs again here
                output.sum().backward()
    plain(x)
    same(layer, plain, 1e-5)


def test_a_compiled_stage_is_compiled_once() -> None:
    from torch._dynamo.utils import counters

    ours = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    plain = copy.deepcopy(ours)
    torch.compiler.reset()
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    deferred = DeferredStatistics(compiled)
    counters.clear()
    for step in range(2):
        x = values(40, 3, seed=step)
        with commit_statistics([deferred]):
            for part in x.split(2):
                with deferred.counting:
                    compiled(part)
        plain(x)
    same(ours, plain, 1e-5)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    ours = nn.BatchNorm2d(3, momentum=None, device="cuda")
    plain = copy.deepcopy(ours)
    x = values(7, 3, 4, 4, dtype=dtype).cuda()
    run(ours, x, [3, 2, 2])
    plain(x)
    same(ours, plain, 1e-4)
