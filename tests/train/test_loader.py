"""Loaders: the replicas' parts together are torch's own batches, in the same order, and nobody loads what others need.

Most tests stand at every place of a mesh one after the other, in one process; the last ones are four processes.
"""

from __future__ import annotations

import random
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import data as torch_data

import penstock as ps
from penstock.train.loader import _Placement, without_samples
from penstock.train.prefetch import copy_batch
from tests.support.loading import (
    FakeMesh,
    FakePipeline,
    IterableNumbers,
    RecordingDataset,
    batches_per_replica,
    global_batches,
    sample_numbers,
)
from tests.support.models import assert_same, gradients, mlp
from tests.support.ranks import Ranks

# ── shares ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_ten_samples_for_four_replicas() -> None:
    assert [_Placement(4, rank).share_of("0123456789") for rank in range(4)] == ["012", "345", "67", "89"]


def test_two_samples_for_three_replicas() -> None:
    assert [_Placement(3, rank).share_of("01") for rank in range(3)] == ["0", "1", ""]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_the_parts_together_are_the_plain_batches(draw: st.DataObject) -> None:
    data = draw.draw(st.integers(1, 5), "replicas")
    samples = draw.draw(st.integers(0, 40), "samples")
    batch_size = draw.draw(st.integers(data, 12), "batch_size")
    drop_last = draw.draw(st.booleans(), "drop_last")
    order = draw.draw(st.permutations(range(samples)), "order")
    prefetch = draw.draw(st.integers(0, 3), "prefetch")
    dataset = torch.arange(samples) * 10
    plain = list(torch_data.DataLoader(dataset, batch_size, sampler=order, drop_last=drop_last))  # type: ignore[arg-type]
    parts = batches_per_replica(dataset, batch_size, data, sampler=order, drop_last=drop_last, prefetch=prefetch)
    assert_same(global_batches(parts), plain)
    for row in zip(*parts, strict=True):
        sizes = [len(part) for part in row]
        assert sizes == sorted(sizes, reverse=True)
        assert max(sizes) - min(sizes) <= 1
    loader = ps.DataLoader(dataset, batch_size, mesh=FakeMesh(data), sampler=order, drop_last=drop_last)
    assert len(loader) == len(plain)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 4), st.integers(0, 30), st.integers(4, 9), st.booleans())
def test_a_stream_is_shared_in_the_same_way(data: int, samples: int, batch_size: int, drop_last: bool) -> None:
    plain = list(torch_data.DataLoader(IterableNumbers(samples), batch_size, drop_last=drop_last))
    assert_same(
        global_batches(batches_per_replica(IterableNumbers(samples), batch_size, data, drop_last=drop_last)), plain
    )


def test_batches_of_a_batch_sampler_are_shared() -> None:
    batches = [[3, 1, 4], [1], [5, 9, 2, 6]]
    parts = batches_per_replica(torch.arange(10), None, 2, batch_sampler=batches)
    assert [part.tolist() for part in global_batches(parts)] == batches
    assert [part.tolist() for part in parts[1]] == [[4], [], [2, 6]]
    assert len(ps.DataLoader(torch.arange(10), batch_sampler=batches)) == 3


def test_every_tensor_rank_gets_the_same_part() -> None:
    for rank in range(2):
        grid = FakeMesh(2, rank, tensor=2)
        assert [x.tolist() for x in ps.DataLoader(range(4), 4, mesh=grid)] == [[2 * rank, 2 * rank + 1]]


def test_each_replica_reads_its_own_samples_alone() -> None:
    dataset = RecordingDataset(10)
    list(ps.DataLoader(dataset, 4, mesh=FakeMesh(2, 1)))
    assert dataset.read == [2, 3, 6, 7, 9]


def test_without_a_mesh_it_is_a_plain_loader() -> None:
    ours = list(ps.DataLoader(RecordingDataset(7), 3))
    assert_same(ours, list(torch_data.DataLoader(RecordingDataset(7), 3)))


# ── parts without samples ────────────────────────────────────────────────────────────────────────────────────────

Pair = namedtuple("Pair", "image label")


class Odd(torch_data.Dataset[Any]):
    """A sample with everything in it."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        image = torch.zeros(3, 5, dtype=torch.bfloat16)
        return {"pair": Pair(image, index), "more": [0.5, "text"], "at": OrderedDict(flag=True)}


def test_a_part_without_samples_has_the_structure_and_the_dtypes() -> None:
    *_, full = ps.DataLoader(Odd(), 2, mesh=FakeMesh(2, 0))
    *_, empty = ps.DataLoader(Odd(), 2, mesh=FakeMesh(2, 1))
    assert full["pair"].label.tolist() == [2]
    assert type(empty["pair"]) is Pair
    assert empty["pair"].image.shape == (0, 3, 5)
    assert empty["pair"].image.dtype is torch.bfloat16
    assert empty["pair"].label.dtype is torch.int64
    assert empty["more"][0].dtype is torch.float64
    assert empty["more"][1] == type(full["more"][1])()
    assert empty["at"]["flag"].dtype is torch.bool
    assert type(empty["at"]) is OrderedDict


def test_a_part_without_samples_of_a_batch_that_is_an_object() -> None:
    def collate(samples: list[Any]) -> Any:
        return UserDict(x=torch.tensor(samples), scale=torch.tensor(2.0), name="train", none=None)

    *_, empty = ps.DataLoader(range(3), 2, mesh=FakeMesh(2, 1), collate_fn=collate)
    assert isinstance(empty, UserDict)
    assert_same(dict(empty), {"x": torch.tensor([], dtype=torch.int64), "scale": torch.tensor(2.0), **NOTHING})


NOTHING = {"name": "train", "none": None}


def test_emptying_leaves_the_batch_alone() -> None:
    batch = UserDict(x=torch.ones(2))
    assert len(without_samples(batch)["x"]) == 0
    assert len(batch["x"]) == 2


def test_an_object_that_has_no_empty_form_is_named() -> None:
    loader = ps.DataLoader(range(3), 2, mesh=FakeMesh(2, 1), collate_fn=lambda samples: {"s": set(samples)})
    with pytest.raises(ps.PlanError, match=r"no samples of the last mini-batch, .* an empty set: .* drop_last=True"):
        list(loader)


# ── order ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_shuffled_alike_on_every_rank_and_for_any_number_of_replicas() -> None:
    dataset = torch.arange(23)
    seen = []
    for data in (1, 2, 4):
        parts = []
        for rank in range(data):
            torch.manual_seed(10 * data + rank)
            random.seed(rank)
            loader = ps.DataLoader(dataset, 8, mesh=FakeMesh(data, rank), shuffle=True, seed=5)
            parts.append([*loader, *loader])
        seen.append(global_batches(parts))
    assert_same(seen[1], seen[0])
    assert_same(seen[2], seen[0])
    first, second = torch.cat(seen[0][:3]), torch.cat(seen[0][3:])
    assert sorted(first.tolist()) == sorted(second.tolist()) == dataset.tolist()
    assert first.tolist() != second.tolist() != dataset.tolist()


def test_seed_and_epoch_are_two_things() -> None:
    orders = set()
    for seed in range(3):
        loader = ps.DataLoader(range(50), 50, shuffle=True, seed=seed)
        orders |= {tuple(x.tolist()) for _ in range(3) for x in loader}
    assert len(orders) == 9


@pytest.mark.parametrize("num_workers", [0, 1])
def test_global_generators_are_left_alone(num_workers: int) -> None:
    before = torch.get_rng_state(), random.getstate()
    list(ps.DataLoader(range(9), 4, shuffle=True, num_workers=num_workers))
    list(ps.DataLoader(range(9), 4, sampler=torch_data.RandomSampler(range(9)), num_workers=num_workers))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_a_default_device_does_not_matter() -> None:
    with torch.device("meta"):
        loader = ps.DataLoader(range(9), 9, shuffle=True)
        drawn = [sorted(x.tolist()) for x in loader]
    assert drawn == [list(range(9))]


def test_epochs_follow_each_other_or_are_set() -> None:
    loader = ps.DataLoader(RecordingDataset(20), 5, shuffle=True)
    epochs = [sample_numbers(loader) for _ in range(3)]
    assert loader.epoch == 3
    loader.set_epoch(1)
    assert loader.epoch == 1
    assert sample_numbers(loader) == epochs[1]
    assert sample_numbers(loader) == epochs[2]


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"sampler": torch_data.RandomSampler(range(30))},
        lambda: {"sampler": torch_data.RandomSampler(range(30), replacement=True)},
        lambda: {"sampler": torch_data.WeightedRandomSampler(torch.ones(30), 30)},
        lambda: {"sampler": torch_data.SubsetRandomSampler(range(30))},
        lambda: {"batch_sampler": torch_data.BatchSampler(torch_data.RandomSampler(range(30)), 4, False)},
    ],
    ids=["random", "replacement", "weighted", "subset", "batches"],
)
def test_random_samplers_draw_from_seed_and_epoch(make: Any) -> None:
    seen = []
    for data in (1, 3):
        parts = []
        for rank in range(data):
            torch.manual_seed(rank)
            options = make()
            batch_size = None if "batch_sampler" in options else 4
            loader = ps.DataLoader(torch.arange(30), batch_size, mesh=FakeMesh(data, rank), seed=1, **options)
            parts.append([*loader, *loader])
        seen.append(global_batches(parts))
    assert_same(seen[1], seen[0])
    steps = len(seen[0]) // 2
    assert torch.cat(seen[0][:steps]).tolist() != torch.cat(seen[0][steps:]).tolist()


class Turned(torch_data.Sampler[int]):
    """Begins at the epoch's number."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from [*range(self.epoch, 6), *range(self.epoch)]

    def __len__(self) -> int:
        return 6


def test_a_sampler_is_told_the_epoch_even_where_epochs_overlap() -> None:
    loader = ps.DataLoader(RecordingDataset(6), 3, sampler=Turned())
    one, other = iter(loader), iter(loader)
    assert [y.tolist() for _, y in other] == [[1, 2, 3], [4, 5, 0]]
    assert [y.tolist() for _, y in one] == [[0, 1, 2], [3, 4, 5]]


def test_a_stream_is_told_the_epoch() -> None:
    stream = IterableNumbers(4)
    loader = ps.DataLoader(stream, 2)
    list(loader)
    list(loader)
    assert stream.epochs == [0, 1]


class Careless(torch_data.Sampler[int]):
    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def __iter__(self) -> Iterator[int]:
        return iter(self.draw())


@pytest.mark.parametrize(
    "sampler",
    [
        Careless(lambda: torch.randperm(50).tolist()),
        Careless(lambda: random.sample(range(50), 50)),
        torch_data.RandomSampler(range(50), generator=torch.Generator()),
        (i for i in range(50)),
    ],
    ids=["torch", "random", "generator", "once"],
)
def test_a_sampler_that_ranks_would_not_share_is_refused(sampler: Any) -> None:
    with pytest.raises(ps.PlanError, match="gives another order each time"):
        ps.DataLoader(range(50), 5, sampler=sampler)
    batches = torch_data.BatchSampler(sampler, 5, False)
    if not isinstance(sampler, Iterator):
        with pytest.raises(ps.PlanError, match="gives another order each time"):
            ps.DataLoader(range(50), batch_sampler=batches)


def test_samplers_may_give_tensors() -> None:
    sampler = torch.tensor([[3, 1], [0, 2]])
    assert [x.tolist() for x in ps.DataLoader(range(4), batch_sampler=sampler)] == [[3, 1], [0, 2]]


# ── what each pipe rank gets ─────────────────────────────────────────────────────────────────────────────────────


def test_a_rank_without_first_and_last_stage_reads_one_sample_and_counts() -> None:
    dataset = RecordingDataset(10)
    loader = ps.DataLoader(dataset, 4, pipe=FakePipeline(FakeMesh(2, 1, 4, 1), 1), shuffle=True)
    assert list(loader) == list(loader) == [[None, None]] * 3
    assert len(dataset.read) == 1
    assert len(loader) == 3


def test_what_a_middle_rank_gets_may_be_changed() -> None:
    loader = ps.DataLoader(RecordingDataset(6), 2, pipe=FakePipeline(FakeMesh(1, 0, 4, 1), 1))
    assert [batch.pop() for batch in loader] == [None] * 3


def test_a_middle_rank_reads_one_sample_as_the_dataset_likes_it() -> None:
    class Several(RecordingDataset):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            self.read += indices
            return [{"a": torch.ones(2), "b": ("text", i)} for i in indices]

    dataset = Several(6)
    loader = ps.DataLoader(dataset, 2, pipe=FakePipeline(FakeMesh(1, 0, 4, 2), 2))
    assert list(loader) == [{"a": None, "b": [(None,), None]}] * 3
    assert dataset.read == [0]


@pytest.mark.parametrize("stages", [(0,), (3,), (0, 3)], ids=["first", "last", "both, of a V"])
def test_ranks_with_the_first_or_the_last_stage_load(stages: tuple[int, ...]) -> None:
    assert sample_numbers(ps.DataLoader(RecordingDataset(5), 2, pipe=FakePipeline(FakeMesh(1, 0, 4, 2), *stages))) == [
        [0, 1],
        [2, 3],
        [4],
    ]


def test_a_mesh_alone_gives_data_to_both_ends_of_the_pipeline() -> None:
    got = [list(ps.DataLoader(torch.arange(4), 2, mesh=FakeMesh(1, 0, 4, r))) for r in range(4)]
    assert_same(got[0], [torch.tensor([0, 1]), torch.tensor([2, 3])])
    assert_same(got[3], got[0])
    assert got[1] == got[2] == [None, None]


@pytest.mark.parametrize("how", ["mesh", "pipe"])
def test_everywhere(how: str) -> None:
    grid = FakeMesh(1, 0, 4, 1)
    place = {"mesh": grid} if how == "mesh" else {"pipe": FakePipeline(grid, 1)}
    assert sample_numbers(ps.DataLoader(RecordingDataset(5), 2, everywhere=True, **place)) == [[0, 1], [2, 3], [4]]  # type: ignore[arg-type]


def test_a_middle_rank_counts_a_stream_to_its_end() -> None:
    assert list(ps.DataLoader(IterableNumbers(7), 3, mesh=FakeMesh(2, 0, 3, 1))) == [None] * 3


def test_a_pipeline_in_this_process_loads() -> None:
    with ps.Pipeline(ps.split(mlp(4), stages=4), F.cross_entropy, microbatches=2) as pipe:
        dataset = torch_data.TensorDataset(torch.randn(6, 4), torch.arange(6) % 4)
        losses = [pipe.step(x, y).loss for x, y in ps.DataLoader(dataset, 4, pipe=pipe)]
    assert len(losses) == 2


def test_of_a_pair_inputs_and_targets_go_to_their_own_devices() -> None:
    there, here = torch.device("cuda", 0), torch.device("cuda", 1)
    went: list[Any] = []

    def copy(tensor: Tensor, device: torch.device) -> Tensor:
        went.append(device.index)
        return tensor + 100

    x, y = torch.zeros(1), torch.ones(1)
    assert_same(copy_batch([x, y], there, None, copy), [x + 100, y])
    assert_same(copy_batch((x, y), None, here, copy), (x, y + 100))
    assert went == [0, 1]
    assert_same(copy_batch(({"a": x, "b": y}, "text"), there, here, copy), ({"a": x + 100, "b": y + 100}, "text"))
    moved = copy_batch(Pair(x, y), there, here, copy)
    assert type(moved) is Pair
    assert went == [0, 1, 0, 0, 0, 1]
    assert_same(copy_batch({"x": x, "y": y}, None, here, copy), {"x": x + 100, "y": y + 100})
    assert went[6:] == [1, 1]


# ── what cannot be ───────────────────────────────────────────────────────────────────────────────────────────────


def test_an_empty_dataset_has_no_steps() -> None:
    for options in ({}, {"shuffle": True}, {"prefetch": 0}, {"mesh": FakeMesh(2, 1, 3, 1)}):
        loader = ps.DataLoader(RecordingDataset(0), 2, **options)  # type: ignore[arg-type]
        assert len(loader) == 0
        assert list(loader) == []


class Nameless:
    def __getitem__(self, index: int) -> int:
        return index


class Piped(torch_data.IterDataPipe):  # type: ignore[type-arg]
    pass


def test_refused() -> None:
    for dataset, batch_size, options, message in [
        (range(9), 0, {}, "batch_size must be a number of samples, at least 1, got 0"),
        (range(9), None, {}, "batch_size must be a number of samples"),
        (range(9), True, {}, "got True"),
        (range(9), 2.0, {}, r"got 2\.0"),
        (range(9), 3, {"mesh": FakeMesh(4)}, r"batch_size=3 is too small for 4 replicas.*at least 4"),
        (range(9), 3, {"batch_sampler": [[1]]}, "leave out batch_size and drop_last"),
        (range(9), None, {"batch_sampler": [[1]], "drop_last": True}, "leave out batch_size and drop_last"),
        (range(9), 3, {"shuffle": True, "sampler": range(9)}, "pass one of them"),
        (range(9), 3, {"sampler": torch_data.DistributedSampler(range(9), 2, 0)}, "is a DistributedSampler"),
        (
            range(9),
            None,
            {"batch_sampler": torch_data.BatchSampler(torch_data.DistributedSampler(range(9), 2, 0), 2, False)},
            "is a DistributedSampler",
        ),
        (iter([1]), 3, {}, r"a list_iterator, has no samples by index"),
        (Nameless(), 3, {}, r"a Nameless, has no length"),
        (IterableNumbers(9), 3, {"shuffle": True}, "an order of its own"),
        (IterableNumbers(9), 3, {"sampler": range(9)}, "an order of its own"),
        (IterableNumbers(9), 3, {"num_workers": 2}, r"num_workers=2 processes would each read the whole"),
        (Piped(), 3, {}, "DataPipes shard themselves"),
        (range(9), 3, {"prefetch": -1}, "prefetch must be a number of batches, or 0 for none, got -1"),
        (range(9), 3, {"generator": torch.Generator()}, "leave out generator"),
        (range(9), 3, {"in_order": False, "num_workers": 1}, "different orders"),
        (
            range(9),
            3,
            {"mesh": FakeMesh(2), "pipe": FakePipeline(FakeMesh(3), 0)},
            "mesh and pipe disagree.*Pass pipe alone",
        ),
        (range(9), 3, {"mesh": FakeMesh(2), "pipe": FakePipeline(None, 0)}, "mesh and pipe disagree"),
    ]:
        with pytest.raises(ps.PlanError, match=message) as caught:
            ps.DataLoader(dataset, batch_size, **options)
        assert "\n" not in str(caught.value)


def test_mesh_and_pipe_may_agree() -> None:
    assert len(ps.DataLoader(range(9), 3, mesh=FakeMesh(2, 1), pipe=FakePipeline(FakeMesh(2, 1), 0))) == 3


def test_a_batch_sampler_that_gives_an_empty_batch() -> None:
    with pytest.raises(ps.PlanError, match="a mini-batch without samples"):
        list(ps.DataLoader(range(9), batch_sampler=[[1], []]))


def test_a_stream_has_no_length_unless_it_says_so() -> None:
    loader = ps.DataLoader(IterableNumbers(5), 2)
    with pytest.raises(TypeError, match="number of steps is not known"):
        len(loader)

    class Long(IterableNumbers):
        def __len__(self) -> int:
            return self.count

    assert len(ps.DataLoader(Long(5), 2)) == 3
    assert len(ps.DataLoader(Long(5), 2, drop_last=True)) == 2


def test_a_dataset_without_a_length_but_with_a_sampler() -> None:
    loader: ps.DataLoader[int] = ps.DataLoader(Nameless(), 2, sampler=[7, 8, 9])  # type: ignore[arg-type]
    assert [x.tolist() for x in loader] == [[7, 8], [9]]
    assert len(loader) == 2


# ── processes ────────────────────────────────────────────────────────────────────────────────────────────────────


def labels_of(batches: Iterable[Any]) -> list[Any]:
    return [None if y is None else y.tolist() for x, y in batches if (x is None) == (y is None)]


def two_by_two(rank: int, pipe: int, everywhere: bool) -> tuple[list[Any], list[int]]:
    torch.manual_seed(rank)
    dataset = RecordingDataset(7)
    mesh = ps.Mesh(data=-1, pipe=pipe)
    got = labels_of(ps.DataLoader(dataset, 4, mesh=mesh, shuffle=True, seed=2, everywhere=everywhere))
    return got, dataset.read


def test_four_processes_as_two_replicas(four: Ranks) -> None:
    one, other = sample_numbers(ps.DataLoader(RecordingDataset(7), 4, shuffle=True, seed=2))
    upper = [one[:2], other[:2]], one[:2] + other[:2]
    lower = [one[2:], other[2:]], one[2:] + other[2:]
    assert four.check(two_by_two, 2, False) == [upper, upper, lower, lower]


def test_four_processes_as_one_replica(four: Ranks) -> None:
    one, other = sample_numbers(ps.DataLoader(RecordingDataset(7), 4, shuffle=True, seed=2))
    all_of_it, nothing = ([one, other], one + other), ([None, None], one[:1])
    assert four.check(two_by_two, 4, False) == [all_of_it, nothing, nothing, all_of_it]
    assert four.check(two_by_two, 4, True) == [all_of_it] * 4


class Halves(RecordingDataset):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return super().__getitem__(index)[0] / 9, index % 2


def stepping(rank: int, schedule: str, stages: int, data: int) -> tuple[list[Any], list[float], dict[str, Any]]:
    """An epoch of steps, the last one over a single sample; its labels here, losses, and the sum of its gradients."""
    plan = ps.split(mlp(4, 2), stages=stages)
    with ps.Pipeline(plan, F.cross_entropy, microbatches=2, schedule=schedule, mesh=ps.Mesh(data=data, pipe=2)) as pipe:
        loader = ps.DataLoader(Halves(9), 4, pipe=pipe, shuffle=True)
        batches = list(loader)
        losses = [float(pipe.step(x, y).loss) for x, y in batches]
        return labels_of(batches), losses, gradients(pipe.named_parameters())


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize(("schedule", "stages", "loading"), [("1f1b", 2, (0, 1)), ("zbv", 4, (0,))])
def test_one_line_steps_on_every_rank(
    two: Ranks, four: Ranks, schedule: str, stages: int, loading: tuple[int, ...], data: int
) -> None:
    model = mlp(4, 2)
    plain = list(torch_data.DataLoader(Halves(9), 4, sampler=shuffled(9)))
    losses = [F.cross_entropy(model(x), y) for x, y in plain]
    sum(losses).backward()  # type: ignore[union-attr]
    expected = gradients(model)
    for rank, (labels, seen, grads) in enumerate((two, four)[data - 1].check(stepping, schedule, stages, data)):
        replica, pipe_rank = divmod(rank, 2)
        mine = [_Placement(data, replica).share_of(y.tolist()) for _, y in plain]
        assert labels == (mine if pipe_rank in loading else [None] * 3)
        assert seen == pytest.approx([loss.item() for loss in losses])
        assert_same(grads, {name: expected[name] for name in grads})


def shuffled(count: int) -> list[int]:
    """The order of the first epoch."""
    return [int(index) for batch in ps.DataLoader(range(count), count, shuffle=True) for index in batch]
