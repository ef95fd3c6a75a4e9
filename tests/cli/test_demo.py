"""``penstock demo``, its data, and the example: small enough to wait for."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
import sys
import zipfile
from contextlib import closing
from pathlib import Path

import pytest
import torch

import penstock as ps
from penstock import data
from penstock.cli import main
from penstock.cli.demo import PipelineRun, PlainRun, Settings, TrainStep, difference, network
from penstock.data import FILES, load_mnist, read_idx
from penstock.errors import PenstockError
from penstock.train.optimizer_offload import is_offloaded
from tests.support import programs
from tools.make_mnist_extract import extract, write_idx

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory like MNIST's, of 120 digits to train with and 40 to test."""
    folder = tmp_path_factory.mktemp("mnist")
    for half, digits in zip(FILES, load_mnist(), strict=True):
        count = {"train": 120, "test": 40}[half]
        for name, values in zip(FILES[half], (digits.images, digits.labels), strict=True):
            write_idx(folder / name, values[:count])
    return folder


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where the report is written


def run(capsys: pytest.CaptureFixture[str], *argv: object, code: int = 0) -> tuple[str, str]:
    assert main(["demo", *map(str, argv)]) == code
    return capsys.readouterr()


# The demo ---------------------------------------------------------------------------------------------------


def test_demo(few: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    out, err = run(capsys, "--data", few, "--epochs", 2, "--batch-size", 50, "--microbatches", 4)
    assert err == ""
    assert out.startswith("The plan\n\nstage  rank   layers  parameters")
    assert "1f1b: 4 ranks, 4 stages, 4 micro-batches\n" in out
    rows = re.findall(r"^ +(\d)  +(\S+)  +(\S+)  +(\S+)  +\S+%  +\S+  +\S+%$", out, re.MULTILINE)
    assert [row[0] for row in rows] == ["1", "2"]
    for _, ours, plain, gap in rows:
        assert ours == plain
        assert float(gap) < 1e-12
    (ours, plain), *_ = re.findall(r"^test accuracy: pipeline (\S+), plain (\S+)$", out, re.MULTILINE)
    assert ours == plain
    closing = out.splitlines()[-3:]
    assert closing[0] == "4 stages on 4 threads trained 6 steps of 4 micro-batches by 1f1b."  # of 50, 50 and 20 digits
    assert closing[1].startswith("Loss and gradient norm were the plain model's at every step, but for rounding (")
    bubble = r"The bubble of 1f1b is 42\.9% with even stages, \S+% as measured on \d+ cores?"
    assert re.match(rf"{bubble}\. The report is penstock-demo\.html\.$", closing[2])
    assert torch.get_num_threads() == threads


def test_runs_repeat(few: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def numbers(seed: int) -> str:
        torch.rand(1)  # torch's own RNG is at another place each time
        out, _ = run(capsys, "--data", few, "--epochs", 1, "--seed", seed)
        return re.sub(r" +\S+ +\S+%$|\S+% as measured", "", out, flags=re.MULTILINE)  # all but speed and bubble

    assert numbers(3) == numbers(3) != numbers(4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--schedule", "auto"), "4 stages on 4 threads trained 3 steps of 8 micro-batches by auto."),
        (("--schedule", "ZBV"), "4 stages on 2 threads trained 3 steps of 8 micro-batches by zbv."),
        (("--schedule", "interleaved"), "4 stages on 2 threads trained 3 steps of 8 micro-batches by interleaved."),
        (("--strategy", "sharded"), "4 stages on 4 threads trained 3 steps of 8 micro-batches by sharded."),
        (("--batch-size", 1000), "4 stages on 4 threads trained 1 step of 8 micro-batches by 1f1b."),
        (("--stages", 2), "2 stages on 2 threads trained 3 steps of 8 micro-batches by 1f1b."),
        (("--stages", 1), "1 stage on 1 thread trained 3 steps of 8 micro-batches by 1f1b."),
        (("--stages", 2, "--schedule", "zbv"), "2 stages on 1 thread trained 3 steps of 8 micro-batches by zbv."),
    ],
)
def test_schedules(few: Path, capsys: pytest.CaptureFixture[str], options: tuple[object, ...], words: str) -> None:
    out, _ = run(capsys, "--data", few, "--epochs", 1, "--batch-size", 50, *options)
    assert words in out


@pytest.mark.slow
def test_processes(few: Path, tmp_path: Path) -> None:
    """With every option: a call of two steps, and one of one step; all but the first step are recorded."""
    place = tmp_path / "a" / "b"
    options = ("--device-iterations", 2, "--offload-optimiser", "--profile", "--profile-dir", place, "--debug")
    arguments = ("--processes", "--schedule", "zbv", "--data", few, "--epochs", 1, "--batch-size", 50, *options)
    done = programs.run(programs.forked_python("-m", "penstock", "demo", *arguments), programs.environment(), tmp_path)
    out = done.stdout
    assert (done.returncode, done.stderr) == (0, "")
    assert "4 stages on 2 processes trained 3 steps of 8 micro-batches by zbv, with the optimiser's state on the" in out
    assert re.search(r"with even stages, \S+% as measured", out)
    assert re.findall(r"^epoch 1, step (\d)/3: ", out, re.MULTILINE) == ["2", "3"]
    assert out.splitlines()[-1].endswith(". The report is penstock-demo.html.")
    assert "<title>" in Path("penstock-demo.html").read_text(encoding="utf-8")
    trace = ps.Trace.load(place / "trace.json")
    assert (len(trace.steps), len(trace.tracks), trace.missing) == (2, 2, None)
    assert f"\n{trace}\n" in out
    names = {event["name"] for event in json.loads((place / "perfetto.json").read_text())["traceEvents"]}
    assert {"0F0", "3W7"} <= names


@pytest.mark.slow
def test_processes_whose_last_stage_is_not_on_rank_0(few: Path, tmp_path: Path) -> None:
    arguments = ("--processes", "--stages", 2, "--data", few, "--epochs", 1)
    done = programs.run(programs.forked_python("-m", "penstock", "demo", *arguments), programs.environment(), tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    (ours, plain), *_ = re.findall(r"^test accuracy: pipeline (\S+), plain (\S+)$", done.stdout, re.MULTILINE)
    assert ours == plain != "0.0%"


def test_calls(few: Path) -> None:
    """As PopTorch has it, a call takes device iterations times batch-size samples, and gives its results together."""
    digits, _ = load_mnist(few)
    settings = Settings(1, 50, 50, 1e-3, "1f1b", 2, seed=0, data=str(few))
    run = PipelineRun(settings)
    with closing(run.pipe):
        steps = run.call([(x.double(), y) for x, y in digits.batches(50)])
        assert [step.samples for step in steps] == [50, 50, 20]
        assert run.pipe.step_totals.steps == 3


def test_a_trace_of_the_only_step(few: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out, _ = run(capsys, "--data", few, "--epochs", 1, "--batch-size", 500, "--profile", "--profile-dir", tmp_path)
    assert "trace of 1 step: 1f1b, 4 stages on 4 ranks" in out


def test_debug(few: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = run(capsys, "--data", few, "--epochs", 1, "--batch-size", 50, "--stages", 3, "--debug")
    assert "stage 0 on rank 0 cpu: float64[7, 1, 28, 28] -> float64[7, 10, 12, 12], by conv1\n" in out
    assert "stage 2 on rank 2 cpu: float64[7, 20, 4, 4] -> float64[7, 10], by hidden digit\n" in out
    assert "\n1F0 1F1 1B0 1F2 1B1 " in out
    assert re.findall(r"^epoch 1, step (\d)/3: loss \S+  accuracy \S+%  \S+ samples/s", out, re.MULTILINE) == [*"123"]


def test_offloaded(few: Path) -> None:
    """The optimizer is one that brings its state from the host, and others are refused."""
    for offload in (True, False):
        run = PipelineRun(Settings(1, 50, 50, 1e-3, "1f1b", 2, seed=0, offload=offload))
        with closing(run.pipe):
            assert is_offloaded(run.optimizer) == offload


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("processes", [(), ("--processes",)])
def test_on_a_gpu(few: Path, capfd: pytest.CaptureFixture[str], processes: tuple[str, ...]) -> None:
    options = ("--device", "cuda", "--offload-optimiser", "--stages", 2)
    out, _ = run(capfd, "--data", few, "--epochs", 1, "--batch-size", 50, *options, *processes)
    assert "0 cuda:0" in out
    assert "by 1f1b, with the optimiser's state on the host." in out


def test_on_a_terminal(few: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    out, _ = run(capsys, "--data", few, "--epochs", 2)
    assert "epoch 2/2" in out
    assert re.search(r"loss \d\.\d{4}  accuracy \d+\.\d%  \S+ samples/s", out)


# The comparison ---------------------------------------------------------------------------------------------


def test_a_wrong_pipeline_is_found_out(
    few: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain model that starts from other weights stands for a pipeline that goes wrong."""
    monkeypatch.setattr("penstock.cli.demo.PlainRun", lambda settings: other(PlainRun(settings)))

    def other(plain: PlainRun) -> PlainRun:
        plain.model.load_state_dict(network(seed=99).state_dict())
        return plain

    out, err = run(capsys, "--data", few, "--epochs", 1, code=1)
    assert err.startswith("penstock: epoch 1, step 1: the loss is 2.")
    assert "in the pipeline, but 2." in err
    assert "test accuracy" not in out


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        (
            TrainStep(1.000001, 3.0, 5, 10),
            "epoch 2, step 1: the loss is 1.000001 in the pipeline, but 1.0 in the plain",
        ),
        (TrainStep(float("nan"), 3.0, 5, 10), "the loss is nan in the pipeline"),
        (TrainStep(1.0, 24.0, 5, 10), "the gradient norm is 24.0 in the pipeline, but 3.0"),
        (TrainStep(1.0, 3.0, 6, 10), "6 of 10 digits correctly, but the plain model 5"),
    ],
)
def test_differences_that_are_errors(ours: TrainStep, words: str) -> None:
    plain = TrainStep(1.0, 3.0, 5, 10)
    near = TrainStep(1.0 + 1e-12, 3.0, 5, 10)
    assert difference(near, plain, "epoch 1, step 1") == pytest.approx(1e-12, rel=1e-3)
    with pytest.raises(PenstockError, match=re.escape(words)):
        difference(ours, plain, "epoch 2, step 1")


def test_a_loss_that_explodes_is_not_the_pipelines_fault() -> None:
    plain = TrainStep(float("inf"), 3.0, 5, 10)
    with pytest.raises(PenstockError, match="smaller learning rate"):
        difference(plain, plain, "epoch 1, step 1")


# Bad options ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--epochs", "0"), "Invalid value for '--epochs'"),
        (("--batch-size", "many"), "Invalid value for '--batch-size'"),
        (("--test-batch-size", "-1"), "Invalid value for '--test-batch-size'"),
        (("--learning-rate", "0"), "Invalid value for '--learning-rate'"),
        (("--learning-rate", "x"), "Invalid value for '--learning-rate'"),
        (("--seed", "-1"), "Invalid value for '--seed'"),
        (("--microbatches", "81"), "--microbatches 81 is too many: a step has 80 samples"),
        (("--microbatches", "5000", "--batch-size", "6000"), "5000 is too many: a step has 4000 samples"),
        (("--schedule", "zvb"), "there is no schedule 'zvb': did you mean 'zbv'?"),
        (("--schedule", "forward_only"), "'forward_only' has no backward"),
        (("--strategy", "sharded", "--schedule", "1f1b"), "leave out --schedule"),
        (("--strategy", "phased"), "'phased' is not one of 'pipelined', 'sharded'"),
        (("--data", "nowhere"), "nowhere does not have train-images-idx3-ubyte.gz"),
        (("--stages", "5"), "'5' is not one of"),
        (("--stages", "3", "--schedule", "zbv"), "--schedule: "),
        (("--device-iterations", "0"), "Invalid value for '--device-iterations'"),
        (("--profile", "--profile-dir", __file__), "--profile-dir: cannot write to"),
        (("--report", "."), "--report: cannot write '.': it is a directory"),
        (("--report", f"{__file__}/page.html"), "--report: cannot write"),
    ],
)
def test_bad_options(capsys: pytest.CaptureFixture[str], options: tuple[str, ...], words: str) -> None:
    out, err = run(capsys, *options, code=2)
    assert out == ""
    assert words in err.splitlines()[-1]


# The data ---------------------------------------------------------------------------------------------------


def test_extract() -> None:
    for digits, each in zip(load_mnist(), (400, 100), strict=True):
        assert digits.images.shape == (10 * each, 28, 28)
        assert digits.labels.bincount().tolist() == [each] * 10
    assert sum(path.stat().st_size for path in Path(data.__file__).parent.glob("*.gz")) < 1_000_000


def test_batches() -> None:
    digits, _ = load_mnist()
    batches = list(digits.batches(1500))
    assert [len(y) for _, y in batches] == [1500, 1500, 1000]
    x = torch.cat([x for x, _ in batches])
    assert x.shape == (4000, 1, 28, 28)
    assert abs(x.mean().item()) < 0.05
    assert abs(x.std().item() - 1) < 0.05
    mixed = torch.cat([y for _, y in digits.batches(1500, shuffle=7)])
    assert mixed.tolist() == torch.cat([y for _, y in digits.batches(64, shuffle=7)]).tolist()
    assert mixed.tolist() != digits.labels.tolist()
    assert mixed.bincount().tolist() == [400] * 10


def test_idx_files_round_trip(tmp_path: Path) -> None:
    values = torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4)
    write_idx(tmp_path / "values.gz", values)
    assert read_idx(tmp_path / "values.gz").equal(values)


def test_making_an_extract() -> None:
    _, digits = load_mnist()
    once, again = extract(digits, 7), extract(digits, 7)
    assert once.labels.bincount().tolist() == [7] * 10
    assert once.images.equal(again.images)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"not gzip", "cannot be read"),
        (gzip.compress(b"\0\0\x08\x01\0\0\0\x03ab"), "has 2 bytes of data, but its shape [3] needs 3"),
        (gzip.compress(b"\0\0\x0d\x01\0\0\0\x01abcd"), "is not an idx file of bytes: it starts with 00 00 0d 01"),
        (gzip.compress(b"\0\0\x08\x03\0\0"), "is not an idx file of bytes"),
        (gzip.compress(b""), "it starts with nothing"),
        (gzip.compress(b"\0\0\x08\x01\0\0\0\x03abc")[:-9], "cannot be read"),
    ],
    ids=["not gzip", "too short", "not bytes", "half a shape", "empty", "cut off"],  # gzip's bytes hold the time
)
def test_files_that_are_not_idx(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "file.gz"
    path.write_bytes(data)
    with pytest.raises(PenstockError, match=re.escape(words)):
        read_idx(path)


def test_halves_that_do_not_belong_together(few: Path, tmp_path: Path) -> None:
    for name in (name for pair in FILES.values() for name in pair):
        (tmp_path / name).write_bytes((few / name).read_bytes())
    write_idx(tmp_path / FILES["test"][1], torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(PenstockError, match=re.escape("they have the shapes [40, 28, 28] and [3]")):
        load_mnist(tmp_path)


def test_wheel_has_the_data(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "src" / "penstock" / "data", tmp_path / "src" / "penstock" / "data")
    shutil.copy(ROOT / "src" / "penstock" / "__init__.py", tmp_path / "src" / "penstock")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(tmp_path)], check=True, timeout=150)
    (wheel,) = tmp_path.glob("penstock-*.whl")
    inside = zipfile.ZipFile(wheel).namelist()
    for name in ("README.md", "__init__.py", *FILES["train"], *FILES["test"]):
        assert f"penstock/data/{name}" in inside
