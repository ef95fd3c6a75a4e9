"""The snippets of the PopTorch tutorial run unchanged, except the import, and match the plain model."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import penstock.compat.poptorch as poptorch
from tests.seeds.mnist_pipeline import main, run, tutorial
from tests.seeds.vision import SHARED, fake_torchvision, full_mnist_folder

DOCUMENT = SHARED / "seeds" / "003_fb62da25efc40fa7.txt"

# Python 3.12 warns of a fork beside threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

Call = tuple[Tensor, Tensor, Tensor, Tensor]


@pytest.mark.skipif(not DOCUMENT.is_file(), reason="the document is not at hand")
def test_snippets_match_the_document() -> None:
    found = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    changed = [cell.replace("import poptorch", "import penstock.compat.poptorch as poptorch") for cell in found]
    assert [cell.strip() for cell in changed] == [cell.strip() for cell in tutorial()]


class RecordedModel:
    """A training model that records its calls."""

    def __init__(self, model: poptorch.PoplarExecutor) -> None:
        self.model = model
        self.calls: list[Call] = []

    def __call__(self, data: Tensor, labels: Tensor) -> Any:
        preds, losses = self.model(data, labels)
        self.calls.append((data.clone(), labels.clone(), preds, losses))
        return preds, losses


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Operators on few samples are faster with one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def names() -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    with fake_torchvision():
        yield {"__name__": "tutorial"}


def replay(model: Any, calls: list[Call]) -> None:
    """Train the plain model on the arguments of the calls and compare the results."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    for call in calls:
        data, labels, preds, losses = (tensor.to(device) for tensor in call)
        assert len(data) == 40 * 10 * 10
        for iteration in range(10):
            optimizer.zero_grad()
            for k in range(10 * iteration, 10 * iteration + 10):
                rows = slice(40 * k, 40 * k + 40)
                output = model(data[rows])
                loss = F.cross_entropy(output, labels[rows])
                (loss / 10).backward()
                torch.testing.assert_close(preds[rows], output.detach(), rtol=1e-3, atol=1e-3)
                torch.testing.assert_close(losses[k], loss.detach(), rtol=1e-3, atol=1e-3)
            optimizer.step()
    model.cpu()


@pytest.mark.slow
def test_notebook(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    for cell in range(19):
        run(cell, names)
    assert (len(names["training_data"]), names["training_data"].combinedBatchSize) == (1, 4000)
    assert (len(names["test_data"]), names["test_data"].combinedBatchSize) == (1, 800)
    opts = names["train_opts"]
    assert repr(opts.execution_strategy) == "PipelinedExecution(Stage('B1'), Stage('B2'), Stage('B3'), Stage('B4'))"
    assert repr(opts.TensorLocations) == "_TensorLocationOptions(location_optimizer={'onChip': 0})"
    assert opts.Training.gradient_accumulation == opts.device_iterations == 10
    assert repr(names["pipelined_strategy"]) == "PipelinedExecution(Stage('B1', 'B2').ipu(0), Stage('B3', 'B4').ipu(1))"
    get_training_model, plain = names["get_training_model"], copy.deepcopy(names["model"])
    names["get_training_model"] = lambda opts, model: RecordedModel(get_training_model(opts, model))
    run(19, names)
    recording = names["training_model"]
    assert len(recording.calls) == 3  # one call per epoch: the extract has 4,000 digits
    names["training_data"].terminate()
    replay(plain, recording.calls)
    recording.model.copyWeightsToHost()
    for name, tensor in names["model"].state_dict().items():
        torch.testing.assert_close(tensor, plain.state_dict()[name], rtol=1e-3, atol=1e-3)
    run(20, names)
    run(21, names)
    run(22, names)
    names["test_data"].terminate()
    text = capsys.readouterr().out
    assert "Epoch 3/3" in text
    found = re.search(r"Accuracy on test set: (\d+\.\d+)%", text)
    assert found is not None
    assert float(found[1]) > 75  # after 30 updates; the test below uses all of MNIST
    x = names["test_dataset"][0][0][None].repeat(800, 1, 1, 1)
    output = names["inference_model"](x)
    names["inference_model"].copyWeightsToHost()
    torch.testing.assert_close(output, names["model"](x).detach(), rtol=1e-2, atol=1e-2)
    recording.model.destroy()
    names["inference_model"].destroy()


STRATEGIES = {"10": "four stages", "11": "names", "13": "two stages", "14": "sharded"}


@pytest.mark.parametrize("cell", STRATEGIES, ids=STRATEGIES.get)
@pytest.mark.parametrize("offload", [False, True], ids=["on chip", "off chip"])
def test_strategies_match_the_plain_model(names: dict[str, Any], cell: str, offload: bool) -> None:
    for number in (0, 1, 2, 4, 5, 6, 7, 8, 9):
        run(number, names)
    run(int(cell), names)
    opts = names["train_opts"]
    if cell in ("13", "14"):
        opts.setExecutionStrategy(names["pipelined_strategy" if cell == "13" else "sharded_strategy"])
    opts.deviceIterations(2).outputMode(poptorch.OutputMode.All)
    opts.Training.gradientAccumulation(7)
    if offload:
        run(15, names)
    model = names["model"].double()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.001)
    with names["get_training_model"](opts, model) as training_model:
        for call in range(2):
            x = torch.randn(28, 1, 28, 28, dtype=torch.float64, generator=torch.Generator().manual_seed(call))
            labels = torch.arange(28) % 10
            preds, losses = training_model(x, labels)
            expected = []
            for update in range(2):
                optimizer.zero_grad()
                for k in range(7 * update, 7 * update + 7):
                    output = plain(x[2 * k : 2 * k + 2])
                    expected.append((output.detach(), F.cross_entropy(output, labels[2 * k : 2 * k + 2])))
                    (expected[-1][1] / 7).backward()
                optimizer.step()
            torch.testing.assert_close(preds, torch.cat([output for output, _ in expected]))
            torch.testing.assert_close(losses, torch.stack([loss.detach() for _, loss in expected]))
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


@pytest.mark.slow
def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options take effect; accuracy is not tested, because only a few digits are used."""
    monkeypatch.setattr("tests.seeds.vision.MNIST.__len__", lambda self: 400)
    profile_folder = str(tmp_path / "pipeline_profile")
    few = ["--batch-size", "4", "--device-iterations", "4", "--test-batch-size", "2", "--epochs", "1"]
    for extra in (["--profile", "--profile-dir", profile_folder], ["--strategy", "sharded", "--offload-optimiser"]):
        assert 0 <= main([*few, *extra, "--learning-rate", "0.002"]) <= 100
    assert {path.name for path in Path(profile_folder).iterdir()} == {"training.json", "inference.json"}
    with pytest.raises(SystemExit):
        main(["--strategy", "phased"])


@pytest.mark.skipif("PENSTOCK_SLOW" not in os.environ, reason="minutes: set PENSTOCK_SLOW=1 to train on all of MNIST")
@pytest.mark.skipif(full_mnist_folder() is None, reason="the whole of MNIST is not at hand")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("strategy", ["pipelined", "sharded"])
@pytest.mark.parametrize("offload", [[], ["--offload-optimiser"]], ids=["on chip", "off chip"])
def test_accuracy_after_three_epochs(strategy: str, offload: list[str]) -> None:
    assert main(["--strategy", strategy, *offload, "--data", str(full_mnist_folder())]) >= 98.0
