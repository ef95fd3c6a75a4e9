"""Checkpoints: complete or absent, free of code, and refused with the names that do not fit."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import pickle
import random
import shutil
import signal
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import penstock as ps
from penstock.train import checkpoint, checkpoint_files
from penstock.train.checkpoint import PendingSave
from penstock.train.checkpoint_files import MANIFEST, decode, encode
from tests.support.ranks import RankExited, Ranks, run_ranks

X, Y = torch.linspace(-1, 1, 32).reshape(8, 4), torch.arange(8) % 4


def mlp(width: int = 4, depth: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


def pipeline(model: nn.Module | None = None, stages: int = 2, **options: Any) -> ps.Pipeline:
    plan = ps.split(model or mlp(), stages=stages)
    return ps.Pipeline(plan, F.cross_entropy, microbatches=2, **options)


def train(pipe: ps.Pipeline, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        losses.append(pipe.step(X, Y).loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


OPTIMIZERS: list[Any] = [
    lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    lambda p: torch.optim.AdamW(p, torch.tensor(0.01), foreach=False),
    lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    lambda p: torch.optim.Adagrad(p, 0.1),
    lambda p: torch.optim.Adafactor(p, 0.1),
    lambda p: torch.optim.RMSprop(p, 0.01, centered=True),
    lambda p: torch.optim.NAdam(p, 0.01),
    lambda p: torch.optim.RAdam(p, 0.01),
    lambda p: torch.optim.Rprop(p, 0.01),
]


def test_any_optimizer_goes_on_where_it_was(tmp_path: Path) -> None:
    for number, make in enumerate(OPTIMIZERS):
        with pipeline() as pipe:
            optimizer = make(pipe.parameters())
            train(pipe, optimizer, 2)
            ps.save(tmp_path / str(number), pipe, optimizer)
            expected = train(pipe, optimizer, 2)
        with pipeline(stages=4) as pipe:
            optimizer = make(pipe.parameters())
            ps.load(tmp_path / str(number), pipe, optimizer)
            assert train(pipe, optimizer, 2) == expected


def test_state_keeps_its_dtype(tmp_path: Path) -> None:
    """An optimizer may keep single precision for bf16 parameters; torch's load_state_dict would round it."""
    model = mlp().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number, parameter in enumerate(model.parameters()):
        optimizer.state[parameter]["master"] = torch.full_like(parameter, 1 / 3, dtype=torch.float32)
        optimizer.state[parameter]["number"] = number
    ps.save(tmp_path, model, optimizer)
    again = torch.optim.SGD(model.parameters(), 0.1)
    ps.load(tmp_path, model, again)
    for number, parameter in enumerate(model.parameters()):
        assert torch.equal(again.state[parameter]["master"], optimizer.state[parameter]["master"])
        assert again.state[parameter]["number"] == number


def test_generators_steps_loader_scaler_and_scheduler_are_restored(tmp_path: Path) -> None:
    data = list(zip(X, Y, strict=True))

    def parts() -> tuple[Any, ...]:
        pipe = pipeline(seed=3)
        optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3, 3])
        loader = ps.DataLoader(data, batch_size=2, shuffle=True, pipe=pipe)
        return pipe, optimizer, scheduler, loader, ps.GradScaler(pipe)

    pipe, optimizer, scheduler, loader, scaler = parts()
    batches = iter(loader)
    for _ in range(2):
        pipe.step(*next(batches))
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    ps.save(tmp_path, pipe, optimizer, lr_scheduler=scheduler, loader=loader, scaler=scaler, step=2)
    drawn = torch.rand(2), random.random(), numpy.random.rand()
    rest = [batch[0] for batch in batches]
    pipe.close()
    pipe, optimizer, scheduler, loader, scaler = parts()
    loaded = ps.load(tmp_path, pipe, optimizer, lr_scheduler=scheduler, loader=loader, scaler=scaler)
    assert (loaded.step, pipe.steps, scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (2, 2, 2, 0.1 * 0.1)
    assert torch.equal(torch.rand(2), drawn[0])
    assert (random.random(), numpy.random.rand()) == drawn[1:]
    torch.testing.assert_close([batch[0] for batch in loader], rest)
    pipe.close()


def test_values_of_all_kinds_come_back(tmp_path: Path) -> None:
    extra = {
        "numbers": (1, 2.5, float("inf"), True, None, 10**30),
        3: {"a", "b"},
        ("k", 1): [b"\x00\xff", torch.float16, torch.device("cpu")],
        "counts": Counter({2: 3}),
        "queue": deque([1, 2]),
        "tensor": torch.arange(3),
        "array": numpy.arange(4.0),
        "scalar": numpy.float64(0.1),
    }
    model = mlp()
    ps.save(tmp_path, model, extra=extra)
    found = ps.load(tmp_path, model).extra
    assert torch.equal(found.pop("tensor"), torch.arange(3))
    assert numpy.array_equal(found.pop("array"), numpy.arange(4.0))
    assert found == {key: value for key, value in extra.items() if key not in ("tensor", "array")}
    recursive: list[Any] = []
    recursive.append(recursive)
    for wrong, message in (
        ({"f": mlp}, r"extra\.f is a function: a checkpoint holds numbers"),
        (numpy.array(["a"]), "extra is a ndarray: a checkpoint holds numbers"),
        (recursive, "cannot be written: .*RecursionError"),
        (10**5000, "cannot be written: .*Exceeds the limit"),
    ):
        with pytest.raises(ps.CheckpointError, match=message):
            ps.save(tmp_path, model, extra=wrong)
    assert ps.load(tmp_path, model).extra["scalar"] == 0.1  # the one before


# ── whole or absent ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_damage_is_named_and_the_checkpoint_before_is_taken(tmp_path: Path, caplog: Any) -> None:
    model, checkpoints = mlp(), ps.Checkpoints(tmp_path)
    for step in (1, 2, 3, 4):
        with torch.no_grad():
            model[0].weight.fill_(step)
        assert checkpoints.save(step, model)
    flipped = next((tmp_path / "step-00000004").glob("data-*/__0_0.distcp"))
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 1
    flipped.write_bytes(content)
    next((tmp_path / "step-00000003").glob("data-*/__0_0.distcp")).unlink()
    (tmp_path / "step-00000002" / MANIFEST).write_text("{")
    (tmp_path / "step-00000005").mkdir()  # a save that was killed
    with pytest.raises(ps.CheckpointError, match=r"step-00000004 is damaged: the checksum of __0_0.distcp differs"):
        ps.load(tmp_path / "step-00000004", model)
    assert checkpoints.load(model) == 1
    assert torch.equal(model[0].weight, torch.ones(4, 4))
    for text in ("checksum of __0_0.distcp differs", "__0_0.distcp is missing", "penstock.json cannot be read"):
        assert text in caplog.text


def test_old_checkpoints_are_deleted_when_a_new_one_is_there(tmp_path: Path) -> None:
    model, checkpoints = mlp(), ps.Checkpoints(tmp_path, every=2, keep=2)
    saved = [checkpoints.save(step, model, asynchronous=True) for step in range(1, 9)]
    checkpoints.wait()
    assert saved == [False, True] * 4
    assert [path.name for path in checkpoints.paths()] == ["step-00000008", "step-00000006"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000006", "step-00000008"]


def test_what_a_failed_save_has_left_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, checkpoints = mlp(), ps.Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, model)

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files._Writer, "write_data", full)
        checkpoints.save(2, model, asynchronous=True)
        with pytest.raises(ps.CheckpointError, match=r"step-00000002 cannot be written: .* No space left"):
            checkpoints.save(3, model, asynchronous=True)
    assert checkpoints.load(model) == 1
    checkpoints.save(4, model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000004"]


def overlapping(folder: Path, pipe: ps.Pipeline) -> list[Any]:
    """Save five times without a wait, into two folders, while training goes on."""
    optimizer = torch.optim.Adam(pipe.parameters(), 0.01)
    saves = []
    for step in range(5):
        saves.append(ps.save(folder / str(step % 2), pipe, optimizer, step=step, asynchronous=step < 4))
        train(pipe, optimizer, 1)
    for pending in filter(None, saves):
        pending.wait()
    return [ps.load(folder / name, pipe, optimizer).step for name in "01"]


def overlapping_on_ranks(rank: int, folder: Path) -> list[Any]:
    with pipeline(mesh=ps.Mesh(pipe=2)) as pipe:
        return overlapping(folder, pipe)


def test_a_save_that_begins_during_another_one_waits_for_it(tmp_path: Path, two: Ranks) -> None:
    with pipeline() as pipe:
        assert overlapping(tmp_path / "threads", pipe) == [4, 3]
    assert two.check(overlapping_on_ranks, tmp_path / "ranks") == [[4, 3]] * 2
    for folder in tmp_path.glob("*/*"):
        assert len(list(folder.iterdir())) == 2  # a manifest and its data


def die_in_a_save(rank: int, folder: Path, moment: str, victim: int) -> None:
    """Save twice; in the second save, one rank is killed at some moment."""
    with pipeline(mesh=ps.Mesh(pipe=2), timeout=20.0) as pipe:
        ps.save(folder / "run", pipe, step=1)
        if rank == victim:

            def die(*args: Any, **kwargs: Any) -> Any:
                os.kill(os.getpid(), signal.SIGKILL)

            target = checkpoint_files._Writer if moment in ("write_data", "prepare_local_plan") else checkpoint_files
            setattr(target, moment, die)
        ps.save(folder / "run", pipe, step=2)


@pytest.mark.parametrize(
    ("moment", "victim"),
    [("prepare_local_plan", 1), ("write_data", 0), ("write_data", 1), ("checksum", 1), ("_replace", 0), ("_sync", 0)],
)
def test_a_rank_that_is_killed_in_a_save_leaves_the_checkpoint_before(tmp_path: Path, moment: str, victim: int) -> None:
    results = run_ranks(die_in_a_save, 2, tmp_path, moment, victim)
    assert isinstance(results[victim], RankExited)
    assert isinstance(results[1 - victim], Exception)
    assert ps.load(tmp_path / "run", mlp()).step == 1


class Malicious:
    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)

    def __init__(self, path: Path) -> None:
        self.path = path


def test_nothing_in_a_checkpoint_runs_code(tmp_path: Path) -> None:
    model, ran = mlp(), tmp_path / "ran"
    for place in (".metadata", "__0_0.distcp", MANIFEST):
        path = tmp_path / "checkpoint"
        ps.save(path, model)
        attack = pickle.dumps(Malicious(ran))
        manifest = json.loads((path / MANIFEST).read_text())
        data = path / manifest["data"]
        if place == "__0_0.distcp":  # with a manifest that fits
            torch.save(Malicious(ran), data / place)
            size = (data / place).stat().st_size
            manifest["files"][place] = [size, checkpoint_files.checksum(data / place)]
            for entry in manifest["tensors"].values():
                entry[2] = [[*chunk[:3], 0, size] for chunk in entry[2]]
            (path / MANIFEST).write_text(json.dumps(manifest))
        else:
            (path / place if place == MANIFEST else data / place).write_bytes(attack)
        if place == ".metadata":
            ps.load(path, model)
        else:
            with pytest.raises(ps.CheckpointError, match="cannot be read"):
                ps.load(path, model)
        assert not ran.exists()
        shutil.rmtree(path)


def fails_on_one_rank(rank: int, folder: Path) -> str:
    with pipeline(mesh=ps.Mesh(pipe=2)) as pipe:
        writer: Any = checkpoint_files._Writer
        write = writer.write_data
        try:
            if rank == 1:
                writer.write_data = lambda *args: os.write(os.open("/dev/full", os.O_WRONLY), b"x")
            with pytest.raises(ps.CheckpointError) as caught:
                ps.save(folder / "run", pipe)
            writer.write_data = write
            ps.save(folder / "run", pipe)  # the pipeline and the group go on
        finally:
            writer.write_data = write
        return str(caught.value)


def cannot_be_saved_on_one_rank(rank: int, folder: Path) -> list[str]:
    """``extra``, which only the first rank encodes, and an optimizer that is wrong on the second one."""
    errors = []
    with pipeline(mesh=ps.Mesh(pipe=2)) as pipe:
        right, wrong = torch.optim.Adam(pipe.parameters()), torch.optim.Adam(mlp().parameters())
        for options in ({"extra": mlp}, {"optimizer": wrong if rank == 1 else right}):
            for asynchronous in (False, True):
                with pytest.raises(ps.PenstockError) as caught:
                    ps.save(folder, pipe, **options, asynchronous=asynchronous).wait()  # type: ignore[union-attr]
                errors.append(str(caught.value))
        ps.save(folder, pipe, right, step=1)
        assert ps.load(folder, pipe, right).step == 1
    return errors


def test_an_error_on_one_rank_of_a_save_is_raised_on_all_of_them(tmp_path: Path, two: Ranks) -> None:
    """A rank that returned alone would leave the others waiting, and mix its next save with theirs."""
    first, second = two.check(cannot_be_saved_on_one_rank, tmp_path)
    for text in (*first[:2], *second[:2]):
        assert "extra is a function: a checkpoint holds numbers" in text
    for text in (*first[2:], *second[2:]):
        assert "of the optimizer is not one of the pipeline's" in text
    assert first[2].startswith(f"the checkpoint {tmp_path} cannot be written: on rank 1, PlanError: a parameter")


def test_a_full_disk_is_an_error_on_every_rank(tmp_path: Path, two: Ranks) -> None:
    for text in two.check(fails_on_one_rank, tmp_path):
        assert "run cannot be written: on rank 1, OSError: [Errno 28] No space left on device" in text


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ps.CheckpointError, match=r"the checkpoint .*file/run cannot be written: .*Not a directory"):
        ps.save(tmp_path / "file" / "run", torch.nn.Linear(1, 1))


def test_a_manifest_that_leads_out_of_its_folder_is_refused(tmp_path: Path) -> None:
    model = mlp()
    ps.save(tmp_path, model)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    wrong: list[dict[str, Any]] = [
        {"data": ".."},
        {"data": "/tmp"},
        {"files": {"../x": [1, "0"]}},
        {"tensors": {"model.0.weight": [1]}},
    ]
    for change in wrong:
        (tmp_path / MANIFEST).write_text(json.dumps({**manifest, **change}))
        with pytest.raises(ps.CheckpointError, match="damaged"):
            ps.load(tmp_path, model)
    for text in ("[" * 100_000, "null", "{}", '{"format": "other"}'):
        (tmp_path / MANIFEST).write_text(text)
        with pytest.raises(ps.CheckpointError):
            ps.load(tmp_path, model)


def test_a_damaged_manifest_is_the_packages_error(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    model(X).sum().backward()
    optimizer.step()
    ps.save(tmp_path, model, optimizer, step=1, extra={"a": (1, torch.ones(2))})
    text = (tmp_path / MANIFEST).read_text()
    generator = random.Random(0)
    for _ in range(300):
        data = json.loads(text)
        holder, key = generator.choice(list(places(data)))
        wrong = [None, -1, 1.5, "x", [], {}, [[1]], {"a": 1}, True, {"dict": 3}, {"tensor": "x"}]
        holder[key] = generator.choice(wrong)
        (tmp_path / MANIFEST).write_text(json.dumps(data))
        with contextlib.suppress(ps.CheckpointError):
            ps.load(tmp_path, model, optimizer)


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in JSON data, as a container and a key."""
    for key in data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ():
        yield data, key
        yield from places(data[key])


def test_decoding_has_no_other_kinds() -> None:
    tensors: dict[str, Tensor] = {}
    data = json.loads(json.dumps(encode({"a": [1, (2.0,)]}, "x", tensors)))
    assert decode(data, tensors.__getitem__) == {"a": [1, (2.0,)]}
    for bad in ({"eval": "1"}, {"dtype": "ops"}, {"a": 1, "b": 2}):
        with pytest.raises(ps.CheckpointError):
            decode(bad, tensors.__getitem__)


# ── what does not fit ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_checkpoint_of_something_else_is_refused_with_the_names_that_differ(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    ps.save(tmp_path, model, optimizer, step=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    cases: list[tuple[Any, str]] = [
        (lambda: ps.load(tmp_path, mlp(depth=5)), r"it lacks 4\.bias, 4\.weight and has nothing"),
        (lambda: ps.load(tmp_path, mlp(depth=3)), r"it lacks nothing and has 3\.bias, 3\.weight"),
        (lambda: ps.load(tmp_path, mlp(width=5)), r"0\.weight has the shape \(4, 4\) in it and \(5, 5\) here"),
        (lambda: ps.load(tmp_path, model, torch.optim.SGD(model.parameters())), "the state of Adam, but .* is SGD"),
        (lambda: ps.load(tmp_path, model, scheduler=optimizer), "has no state of scheduler: it has none"),
        (lambda: ps.load(tmp_path / "no", model), "there is no checkpoint at"),
    ]
    for call, message in cases:
        with pytest.raises(ps.CheckpointError, match=message):
            call()
    groups = [{"params": [model[0].weight]}, {"params": [p for p in model.parameters() if p is not model[0].weight]}]
    with pytest.raises(ps.CheckpointError, match="has 1 parameter groups, but the given one has 2"):
        ps.load(tmp_path, model, torch.optim.Adam(groups))
    few = torch.optim.Adam([model[0].weight, model[0].bias, model[1].weight, model[1].bias, model[2].weight])
    with pytest.raises(
        ps.CheckpointError, match=r"2\.bias, 3\.bias, 3\.weight of group 0 .* not in group 0 of the given"
    ):
        ps.load(tmp_path, model, few)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for wrong, message in (
        (lambda: ps.save(tmp_path, model, torch.optim.Adam(mlp().parameters())), "is not one of the pipeline's"),
        (lambda: ps.save(tmp_path, model, torch.optim.LBFGS(model.parameters())), "LBFGS keeps one state"),
        (lambda: ps.save(tmp_path, model, loader=3), "loader is a int without state_dict"),
        (lambda: ps.save(tmp_path, 3), "a checkpoint stores a ps.Pipeline or an nn.Module"),
        (lambda: ps.Checkpoints(tmp_path, every=0), "every is a number from 1 up"),
        (lambda: ps.save(tmp_path, model, scheduler), r"the optimizer is a StepLR: pass others by name"),
        (lambda: ps.save(tmp_path, model, step=-1), "step is a number from 0 up, got -1"),
        (lambda: ps.Checkpoints(tmp_path, every=2).save(1.5, model), r"step is a number from 0 up, got 1\.5"),
        (lambda: ps.load(tmp_path, mlp().to("meta")), "0.weight is on the meta device, without memory to load into"),
    ):
        with pytest.raises(ps.PlanError, match=message):
            wrong()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(model.state_dict(), before)


class Counting(nn.Linear):
    """A module with extra state that is no tensor."""

    calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def test_extra_state_of_modules(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Counting(4, 4))
    model[1].calls = 5
    with pipeline(model) as pipe:
        ps.save(tmp_path, pipe)
    again = nn.Sequential(nn.Linear(4, 4), Counting(4, 4))
    with pipeline(again) as pipe:
        ps.load(tmp_path, pipe)
    assert again[1].calls == 5


# ── ranks ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def written_here(rank: int, folder: Path) -> set[str]:
    """The tensors of the model that this rank has written."""
    with pipeline(mesh=ps.Mesh(pipe=2)) as pipe:
        ps.save(folder, pipe, torch.optim.Adam(pipe.parameters()))
        manifest = json.loads((folder / MANIFEST).read_text())
        own = [name for name, entry in manifest["tensors"].items() if entry[2][0][2] == f"__{rank}_0.distcp"]
        return {name for name in own if name.startswith("model.")}


def test_each_rank_writes_its_own_tensors(tmp_path: Path, two: Ranks) -> None:
    expected = [{f"model.{i}.{name}" for i in layers for name in ("weight", "bias")} for layers in ((0, 1), (2, 3))]
    assert two.check(written_here, tmp_path) == expected


def group_after_the_end(rank: int, folder: Path) -> bool:
    mesh = ps.Mesh(pipe=2)
    with pipeline(mesh=mesh) as pipe:
        ps.save(folder, pipe, asynchronous=True)
        PendingSave.finish()
    dist.destroy_process_group()
    gc.collect()
    return checkpoint._groups[mesh]() is None


def test_the_group_of_checkpoints_ends_with_the_process_group(tmp_path: Path) -> None:
    """Its threads release tensors. If they did so at the end of the interpreter, the process was aborted."""
    assert run_ranks(group_after_the_end, 2, tmp_path) == [True, True]


def sharded(rank: int, folder: Path, sizes: dict[str, int], how: str, save: bool) -> Tensor:
    """A pipeline with fully_shard or tensor parallelism in its stages."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def parallelize(stage: nn.Module, mesh: ps.Mesh) -> None:
        if how == "fsdp":
            fully_shard(stage, mesh=mesh["data"])
        elif how == "tensor":
            names = [name for name, module in stage.named_modules() if isinstance(module, nn.Linear)]
            styles = [ColwiseParallel(), RowwiseParallel()]
            parallelize_module(stage, mesh["tensor"], {n: styles[i % 2] for i, n in enumerate(names)})

    model = mlp()
    with pipeline(model, sizes["pipe"], mesh=ps.Mesh(**sizes), parallelize=parallelize if how else None) as pipe:
        optimizer = torch.optim.Adam(pipe.parameters(), 0.01, foreach=False)
        mesh = pipe.mesh
        assert mesh is not None
        x, y = (part.chunk(mesh.data)[mesh.data_rank] for part in (X, Y))
        if not save:
            ps.load(folder, pipe, optimizer)
        for _ in range(2):
            loss = pipe.step(x, y).loss
            optimizer.step()
            optimizer.zero_grad()
        if save:
            ps.save(folder, pipe, optimizer)
        return loss


@pytest.mark.slow
def test_shards_of_fsdp_and_tensor_parallel_stages_are_resharded(tmp_path: Path, four: Ranks, two: Ranks) -> None:
    with pipeline() as pipe:
        optimizer = torch.optim.Adam(pipe.parameters(), 0.01)
        expected = train(pipe, optimizer, 4)
    data, tensor = {"data": 2, "pipe": 2}, {"pipe": 2, "tensor": 2}
    for first, second in ((data, "fsdp"), (tensor, "tensor")), ((tensor, "tensor"), ({"pipe": 4}, "")):
        folder = tmp_path / second[1] / first[1]
        losses = [float(four.check(sharded, folder, *first, True)[0])]
        losses.append(float(four.check(sharded, folder, *second, False)[0]))
        torch.testing.assert_close(losses, [expected[1], expected[3]])
