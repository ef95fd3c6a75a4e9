"""``python -m varuna.run_varuna``: an unchanged script, in as many processes as it asks for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.compat.varuna import run_varuna
from tests.support.fork_python import fork_python

ROOT = Path(__file__).parents[2]

SCRIPT = """
import argparse, os, torch
import torch.distributed as dist
from torch import nn
from varuna import CutPoint, Varuna, get_this_rank_config_varuna, get_varuna_config

parser = argparse.ArgumentParser()
for name in ("rank", "local_rank", "batch_size", "chunk_size", "epochs"):
    parser.add_argument(f"--{name}", type=int)
parser.add_argument("--stage_to_rank_map")
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()
dist.init_process_group("gloo", rank=args.rank)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.cut = nn.Linear(4, 4), nn.Linear(4, 1), CutPoint()

    def forward(self, x):
        return self.b(self.cut(torch.relu(self.a(x)))).square().mean()


torch.manual_seed(0)
net = Net()
x = torch.randn(args.batch_size, 4)
plain = net(x).item()
stages, replicas = get_varuna_config(args.stage_to_rank_map)
model = Varuna(net, args.stage_to_rank_map, {"x": x}, args.batch_size * replicas, args.chunk_size, device="cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model.set_optimizer(optimizer)
for _ in range(args.epochs):
    loss, overflow, grad_norm = model.step({"x": x})
    assert abs(loss - plain) < 1e-5 or _ > 0
    optimizer.step()
    model.zero_grad()
open(f"{os.environ['RESULTS']}/{args.rank}", "w").write(
    f"{get_this_rank_config_varuna(args.stage_to_rank_map, args.rank)} {args.stage_to_rank_map} "
    f"{args.local_rank} {args.batch_size} {args.chunk_size} {args.resume} {os.getcwd()} {loss < plain}"
)
"""


def test_a_script_runs_unchanged(tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.py").write_text(SCRIPT)
    (tmp_path / "machines").write_text("# here\n127.0.0.1\n")
    (tmp_path / "env").write_text(f"export RESULTS='{tmp_path}'\n")
    command = (
        f"{fork_python()} -W error -m penstock.compat.alias varuna -- -m varuna.run_varuna --machine_list machines "
        "--manager_ip 127.0.0.1 --gpus_per_node 2 --nstages 2 --batch_size 6 --chunk_size 2 --code_dir code --env_file "
        "env --no_morphing --resume train.py --epochs 2"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command.split(), cwd=tmp_path, env=environment, timeout=150, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        assert (tmp_path / str(rank)).read_text() == f"({rank}, 0) 0;1; {rank} 6 2 True {code.resolve()} True"


def test_how_ranks_and_samples_are_divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    seen: list[list[str]] = []
    monkeypatch.setattr(run_varuna.cli, "main", lambda arguments: seen.append(arguments) or 3)
    line = "--gpus_per_node 6 --nstages 2 --batch_size 24 --chunk_size 4 --no_morphing train.py --lr 0.1"
    assert run_varuna.main(line.split()) == 3
    assert run_varuna.main(line.replace("batch_size", "batch-size").split()) == 3
    rank = "-m penstock.compat.varuna.run_varuna --this-is-a-rank"
    words = f"run --stages 2 --data 3 {rank} 0,2,4;1,3,5; 8 4 train.py --lr 0.1"
    assert [" ".join(arguments) for arguments in seen] == [words] * 2


@pytest.mark.parametrize(
    ("script", "spelling"),
    [
        ("add_argument('-b', '--batch-size', type=int)", "batch-size"),
        ("add_argument('--batch_size', type=int)", "batch_size"),
        ("for name in ('rank', 'batch_size'): add_argument('--' + name)", "batch_size"),
        ("from arguments import parse\nargs = parse()\nprint(args.batch_size)", "batch-size"),
    ],
)
def test_the_batch_size_is_passed_as_the_script_spells_it(
    script: str, spelling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(script)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr("sys.argv", [])
    monkeypatch.setattr("sys.path", [""])
    monkeypatch.setattr("runpy.run_path", lambda path, run_name: None)
    run_varuna.main(["--this-is-a-rank", "0;1;", "32", "4", str(tmp_path / "train.py"), "--epochs", "3"])
    expected = f"--rank=1 --local_rank=0 --stage_to_rank_map=0;1; --{spelling}=32 --chunk_size=4 --epochs 3"
    assert " ".join(sys.argv[1:]) == expected


WELL = {"gpus_per_node": "4", "nstages": "2", "batch_size": "8", "chunk_size": "2", "no_morphing": ""}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"no_morphing": None}, "is not supported: pass --no_morphing"),
        ({"nstages": None}, "required: --nstages"),
        ({"nstages": "0"}, "--gpus_per_node 4 must be a multiple of --nstages 0"),
        ({"nstages": "3"}, "--gpus_per_node 4 must be a multiple of --nstages 3"),
        ({"batch_size": "7"}, "--batch_size 7 one of the number of replicas"),
        ({"machine_list": "others"}, "--machine_list must name this machine alone"),
        ({"machine_list": "two"}, "--machine_list must name this machine alone"),
        ({"env_file": "others"}, "'192.0.2.1' is not NAME=VALUE"),
    ],
)
def test_refused_arguments(
    change: dict[str, str | None],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "others").write_text("192.0.2.1\n")
    (tmp_path / "two").write_text("127.0.0.1\nlocalhost\n")
    monkeypatch.chdir(tmp_path)
    said = {**WELL, **change}
    options = [word for name, value in said.items() if value is not None for word in (f"--{name}", value) if word]
    with pytest.raises(SystemExit):
        run_varuna.main([*options, "train.py"])
    assert complaint in capsys.readouterr().err
