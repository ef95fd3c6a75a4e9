"""The command ``penstock plan``."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

import penstock as ps
from penstock.cli import main
from penstock.profile.costs import Link

MODEL = """
import torch
from torch import nn

def build():
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), torch.randn(8, 4)

net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
sample = torch.randn(4, 4)
number = 3

def fails():
    raise ValueError("on\\npurpose")

class Takes(nn.Module):
    def __init__(self, width):
        super().__init__()
"""


@pytest.fixture
def models(tmp_path: Path) -> str:
    path = tmp_path / "some_models.py"
    path.write_text(MODEL)
    return str(path)


def test_a_function_that_gives_model_and_sample(
    models: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = str(tmp_path / "plan.json")
    words = ["plan", f"{models}:build", "--devices", "2", "--threads", "--seconds", "0.3", "--measure", "0.1"]
    assert main([*words, "--save", saved]) == 0
    text = capsys.readouterr().out
    assert "a step of" in text
    assert f"saved as {saved}" in text
    assert ps.PlanResult.load(saved).layers == ("0", "1", "2", "3")


@pytest.mark.slow
def test_a_model_and_its_sample(
    models: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without ``--threads`` the ranks are processes, and the link between processes is measured."""
    measured = mock.Mock(return_value=Link(1e-5, 1e9))
    monkeypatch.setattr("penstock.profile.planner.plan.process_link", measured)
    words = ["plan", f"{models}:net", "--sample", f"{models}:sample", "--devices", "2", "--batch", "8"]
    assert main([*words, "--seconds", "0.2", "--measure", "0.1"]) == 0
    assert "micro-batch" in capsys.readouterr().out
    measured.assert_called_once()


@pytest.mark.slow
def test_a_model_by_numbers_on_devices_that_are_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--layers", "gpt:22b", "--hardware", "a100", "--devices", "16", "--tensor", "8", "--batch", "16"]
    assert main([*words, "--seconds", "0.5"]) == 0
    text = capsys.readouterr().out
    assert "billion parameters" in text
    assert "of the devices' peak" in text
    assert "8 devices each" in text


# The hardware was taken from the command line, and nobody looked at it: the plan was for this machine.
def test_a_real_model_on_devices_that_are_not_here(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", f"{models}:build", "--devices", "2", "--batch", "8", "--seconds", "0.2"]
    steps = []
    for hardware in ("v100", "b200"):
        assert main([*words, "--hardware", hardware, "--save", f"{models}.{hardware}.json"]) == 0
        steps.append(ps.PlanResult.load(f"{models}.{hardware}.json").best.costs)
    assert "a step of" in capsys.readouterr().out
    assert steps[0] != steps[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--devices", "2"], 2, "no model to plan: give one of"),
        (["x:y", "--layers", "gpt:22b", "--devices", "2"], 2, "give one of"),
        (["--layers", "gpt:22b", "--devices", "2"], 2, "--layers needs --hardware"),
        (["--layers", "gpt:22b", "--hardware", "h101", "--devices", "2"], 1, "did you mean"),
        (["{models}:build", "--devices", "2", "--save", "."], 2, "--save: cannot write '.': it is a directory"),
        (["{models}:build", "--devices", "2", "--save", "no/x"], 2, "cannot write 'no/x': there is no directory 'no'"),
        (["{models}:build", "--devices", "0"], 2, "Invalid value for '--devices'"),
        (["nothing_there:build", "--devices", "2"], 1, "nothing_there cannot be imported"),
        (["{models}:nothing", "--devices", "2"], 1, "has no 'nothing'"),
        (["{models}", "--devices", "2"], 1, "must be MODULE:NAME"),
        (["{models}:number", "--devices", "2"], 1, "expected an nn.Module"),
        (["{models}:net", "--devices", "2"], 1, "no sample to measure the model on"),
        (["{models}:build", "--devices", "4", "--memory", "50B", "--hardware", "v100"], 1, "nothing fits the memory"),
        (["--costs", "nowhere.json", "--devices", "2", "--batch", "4"], 1, "nowhere.json"),
        (["{models}:fails", "--devices", "2"], 1, "ValueError: on purpose (some_models.py, line 13)"),
        (["{models}:Takes", "--devices", "2"], 1, "failed when it was called without arguments: TypeError"),
        (["{models}:build", "--devices", "2", "--seconds", "0"], 2, "Invalid value for '--seconds'"),
        (["{models}:build", "--devices", "2", "--measure", "-1"], 2, "Invalid value for '--measure'"),
        (["{models}:build", "--devices", "2", "--tensor", "2"], 2, "--tensor and --half-layers are for a model"),
        (["{models}:build", "--devices", "2", "--half-layers"], 2, "--tensor and --half-layers are for a model"),
        (["{models}:build", "--devices", "2", "--hardware", "h101"], 1, "did you mean 'h100'"),
        (["--costs", "x", "--hardware", "h100", "--devices", "2"], 2, "--hardware has no effect if --costs"),
        (["--costs", "x", "--sample", "x:y", "--devices", "2"], 2, "--sample is the input of MODULE:NAME"),
        (["--costs", "x", "--measure", "2", "--devices", "2"], 2, "--measure has no effect if no layer is timed"),
        (["--layers", "gpt:22b", "--hardware", "h100", "--threads", "--devices", "2"], 2, "--threads is for devices"),
    ],
)
def test_usage_errors(
    words: list[str], code: int, message: str, models: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *(word.format(models=models) for word in words)]) == code
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
