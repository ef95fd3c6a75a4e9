"""The examples are short, run as documented, start at the plain model's loss and reduce it."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import re
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from penstock.data import load_mnist
from tests.support.programs import environment, run_in_process
from tests.support.ranks import start_ranks

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = ["gpt", "llama", "mnist", "resnet", "unet"]
STEPS = 9
FEW = {"gpt": ["--letters", 5]}


def load(name: str) -> Any:
    if name == "llama":
        pytest.importorskip("transformers")
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
@torch.no_grad()
def first_loss(name: str) -> float:
    """The plain model's loss on the mini-batch of the first step."""
    example = load(name)
    if name == "llama":
        return float(example.network()(**example.batch(0)).loss)
    if name == "gpt":
        letters, ids = example.read(EXAMPLES.parent / "LICENSE")
        x, y = example.batch(ids, 0)
        return float(F.cross_entropy(example.network(len(letters))(x), y))
    if name == "unet":
        x, y = example.pictures(16, seed=0)
        return float(nn.BCEWithLogitsLoss()(example.network()(x), y))
    x, y = next(load_mnist()[0].batches({"mnist": 80, "resnet": 64}[name], shuffle=0))
    parts = 4 if name == "resnet" else 1  # BatchNorm uses statistics of micro-batches
    model = example.network()
    return sum(float(F.cross_entropy(model(a), b)) for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True)) / parts


def losses(printed: str, steps: int) -> list[float]:
    found = [float(loss) for loss in re.findall(rf"^step \d/{steps}  loss (\d\.\d{{4}})  ", printed, re.MULTILINE)]
    assert len(found) == steps, printed
    return found


def script(name: str, *arguments: object) -> None:
    sys.argv = [f"{name}.py", *map(str, arguments)]
    torch.set_num_threads(1)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def run_on_rank(rank: int, name: str, *arguments: object) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        script(name, *arguments)
    return printed.getvalue()


def test_all_examples_are_listed_and_short() -> None:
    others = ["resume"]  # tests/cli/test_elastic.py runs it
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == sorted([*NAMES, *others])
    for name in NAMES:
        assert len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()) < 100


@pytest.mark.parametrize("name", NAMES)
def test_examples_in_threads(name: str, tmp_path: Path) -> None:
    expected = first_loss(name)
    env = environment(OMP_NUM_THREADS="1")
    done = run_in_process(script, name, "--steps", STEPS, *FEW.get(name, []), env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = losses(done.stdout, STEPS)
    assert found[0] == pytest.approx(expected, abs=2e-4)
    assert sum(found[-3:]) / 3 < found[0] - 0.02, found


@pytest.mark.parametrize(("ranks", "names"), [(2, ["gpt", "llama", "resnet"]), (4, ["mnist", "unet"])])
def test_examples_over_processes(ranks: int, names: list[str]) -> None:
    """As under torchrun, with the number of processes that the example documents."""
    with start_ranks(ranks) as processes:
        for name in names:
            if name == "llama" and importlib.util.find_spec("transformers") is None:
                continue
            shown, *silent = processes.check(run_on_rank, name, "--steps", 1, *FEW.get(name, []), timeout=120)
            assert losses(shown, 1) == pytest.approx([first_loss(name)], abs=2e-4)
            assert not any(silent)
