"""Programs that import torchgpipe, fairscale, poptorch, torchdistpackage or varuna, and get Penstock."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import penstock as ps
from penstock import compat
from penstock.compat import alias


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    names = {name for system in compat.SYSTEMS.values() for name in system}
    before = dict(sys.modules)
    yield
    for name in set(sys.modules) - set(before):
        if name.split(".")[0] in names:
            del sys.modules[name]


def test_installed_modules_are_the_facades() -> None:
    compat.install(*compat.SYSTEMS)
    for name in (
        *("torchgpipe", "torchgpipe.gpipe", "torchgpipe.skip.skippable", "torchgpipe.balance.profile"),
        *("torchgpipe_balancing", "fairscale.nn.pipe.async_pipe", "fairscale.nn.model_parallel.initialize"),
        *("poptorch", "poptorch.optim", "poptorch.options"),
        *("varuna", "varuna.varuna", "varuna.utils", "varuna.run_varuna"),
        *("torchdistpackage.dist.process_topo", "torchdistpackage.parallel.pipeline_sched"),
        "torchdistpackage.parallel.pipeline_parallel.pipeline_sched",
    ):
        assert importlib.import_module(name) is importlib.import_module(f"penstock.compat.{name}")
    compat.install("torchgpipe")  # once more is harmless


def test_all_submodules_are_installed() -> None:
    compat.install(*compat.SYSTEMS)
    folder = Path(compat.__file__).parent
    for system in compat.SYSTEMS:
        for path in (folder / system).rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            module = sys.modules[name]
            assert module is sys.modules[f"penstock.compat.{name}"]
            for public in getattr(module, "__all__", ()):  # no submodule has taken the place of a name
                assert not isinstance(getattr(module, public), ModuleType)


def test_unknown_systems_and_real_ones_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ps.PlanError, match="no compat module for 'torchgpip': did you mean 'torchgpipe'"):
        compat.install("torchgpip")
    with pytest.raises(ps.PlanError, match="no compat module for 'deepspeed': there are torchgpipe, fairscale"):
        compat.install("deepspeed")
    monkeypatch.setitem(sys.modules, "fairscale", ModuleType("fairscale"))
    with pytest.raises(ps.PlanError, match=r"fairscale is imported already.*before anything imports it"):
        compat.install("torchgpipe", "fairscale")
    assert "torchgpipe" not in sys.modules  # all or nothing


PROGRAM = """
import subprocess, sys
import torchgpipe.skip
from torchgpipe import GPipe
from torchgpipe_balancing import balance_by_time
import fairscale
assert GPipe.__module__ == "penstock.compat.torchgpipe.gpipe"
assert fairscale.nn.Pipe.__module__ == "penstock.compat.fairscale.pipe"
if __name__ == "__main__":
    print(sys.argv[1:])
    if "child" in sys.argv:
        code = "from torchgpipe.skip.skippable import Skippable; print(Skippable.__module__)"
        print(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the program, to be run in this process."""
    (tmp_path / "aliased_program.py").write_text(PROGRAM)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    kept = [str(Path(path).resolve()) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(kept))
    return tmp_path


INSTALLED = {
    "__init__.py": "raise AssertionError('the facade takes the place of this file')",
    "optim/__init__.py": "from ..nn.wrap import wrap; from .oss import OSS",
    "optim/oss.py": "class OSS: pass",
    "nn/__init__.py": "raise AssertionError('the facade takes the place of this file')",
    "nn/wrap.py": "from fairscale.nn import Pipe\ndef wrap(): return Pipe",
    "nn/data_parallel/__init__.py": "class FullyShardedDataParallel: pass",
    "nn/model_parallel/layers.py": "from .initialize import get_model_parallel_rank",
    "nn/pipe/__init__.py": "raise AssertionError('the facade takes the place of this file')",
    "nn/pipe/checkpoint.py": "def is_recomputing(): return False",
}

USES_INSTALLED = """
import importlib
import fairscale, fairscale.optim, fairscale.nn.model_parallel.layers
from fairscale.nn.data_parallel import FullyShardedDataParallel
from fairscale.nn.wrap import wrap
assert wrap() is fairscale.nn.Pipe and fairscale.optim.wrap is wrap
assert wrap().__module__ == "penstock.compat.fairscale.pipe"
assert fairscale.optim.OSS.__module__ == "fairscale.optim.oss"
try:
    importlib.import_module("fairscale.nn.pipe.checkpoint")  # knows nothing of this pipeline
except ModuleNotFoundError:
    print("fine")
"""


def test_other_packages_of_an_installed_fairscale(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in INSTALLED.items():
        file = here / "site" / "fairscale" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (here / "program.py").write_text(USES_INSTALLED)
    monkeypatch.syspath_prepend(str(here / "site"))
    for name in ("fairscale", "fairscale.nn", "fairscale.nn.model_parallel"):  # of modules that other tests use as well
        module = importlib.import_module(f"penstock.compat.{name}")
        monkeypatch.setattr(module, "__path__", list(module.__path__))
    compat.install("fairscale")
    assert alias.main(["fairscale", "--", "program.py"]) == 0
    assert capsys.readouterr().out == "fine\n"
    with pytest.raises(AttributeError, match=r"no nn\.FullyShardedDataParallel\. If fairscale is installed"):
        _ = importlib.import_module("fairscale.nn").FullyShardedDataParallel


@pytest.mark.slow
def test_aliases_in_a_program_and_its_subprocesses(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert alias.main(["torchgpipe", "fairscale", "--", "aliased_program.py", "child"]) == 0
    assert capsys.readouterr().out.split() == ["['child']", "penstock.compat.torchgpipe.gpipe"]


def test_modules_run_as_well(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert alias.main(["torchgpipe", "fairscale", "--", "-m", "aliased_program", "a", "--", "b"]) == 0
    assert capsys.readouterr().out.split("\n")[0] == "['a', '--', 'b']"


@pytest.mark.parametrize(
    "arguments", [[], ["torchgpipe"], ["torchgpipe", "--"], ["--", "x.py"], ["torchgpipe", "--", "-m"]]
)
def test_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert alias.main(arguments) == 2
    assert "usage: python -m penstock.compat.alias" in capsys.readouterr().err


def test_unknown_systems_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert alias.main(["nothing", "--", "x.py"]) == 2
    assert "no compat module for 'nothing'" in capsys.readouterr().err
