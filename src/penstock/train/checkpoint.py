"""``ps.save`` and ``ps.load``: checkpoints that can be loaded with other numbers of stages and processes.

Tensors are stored under the names of the plain model, each by one of the ranks that have it:

    model.blocks.3.weight                a parameter or buffer
    optimizer.blocks.3.weight.exp_avg    the optimizer's state of it
    random.0.torch                       the random generators of rank 0

A rank reads only the tensors of its stages.
"""

from __future__ import annotations

import hashlib
import logging
import random
import shutil
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from penstock.engine.replicas.dtensor import is_dtensor
from penstock.errors import CheckpointError, PlanError
from penstock.train.checkpoint_files import (
    MANIFEST,
    attempt,
    check_files,
    decode,
    encode,
    gather,
    gather_results,
    read_manifest,
    read_tensors,
    write_checkpoint,
)
from penstock.train.mesh import Mesh
from penstock.train.pipeline import Pipeline

logger = logging.getLogger("penstock")

PREEMPTED = 75  # the exit code EX_TEMPFAIL: try again later

Model = Pipeline | nn.Module
# Weak, so that ``destroy_process_group`` ends the threads of a group. If they outlive the interpreter, they may abort.
_groups: weakref.WeakKeyDictionary[Mesh, weakref.ref[dist.ProcessGroup]] = weakref.WeakKeyDictionary()


class PendingSave:
    """A checkpoint that a thread is writing. ``wait()`` returns when it is complete, or raises the thread's error."""

    latest: ClassVar[PendingSave | None] = None

    def __init__(self, write: Callable[[], None]) -> None:
        thread = ThreadPoolExecutor(1, "penstock checkpoint")
        self._written = thread.submit(write)
        thread.shutdown(wait=False)
        PendingSave.latest = self

    def wait(self) -> None:
        self._written.result()

    @classmethod
    def finish(cls) -> None:
        """Wait for the last checkpoint without its error: ranks that write two at once would mix their messages."""
        if cls.latest is not None:
            cls.latest._written.exception()
            cls.latest = None


@dataclass(frozen=True)
class Loaded:
    """The ``step`` and the ``extra`` values of a loaded checkpoint."""

    path: Path
    step: int | None
    extra: Any


def save(
    path: str | Path,
    pipe: Model,
    optimizer: Optimizer | None = None,
    *,
    step: int | None = None,
    extra: Any = None,
    asynchronous: bool = False,
    **objects: Any,
) -> PendingSave | None:
    """Write a checkpoint into the folder ``path``, between two steps. Under a mesh all ranks call it.

    It contains the parameters and buffers of ``pipe`` (a pipeline or a plain model) under the model's own names, the
    optimizer's state by parameter, the random generators of each rank, ``pipe.steps``, and the state of further
    ``objects`` with a ``state_dict``, the same on all ranks: ``lr_scheduler=…, loader=…, scaler=…``. ``extra`` may
    contain numbers, strings, tensors and containers of them. Gradients are not saved.

    The new checkpoint replaces an old one at ``path`` when it is complete. With ``asynchronous=True`` the call returns
    when all tensors are copied to host memory, and a thread writes them: call ``wait()`` on the result. A further save
    waits for the thread. An error on one rank is raised on all of them.
    """
    _check_number("step", step, 0)
    path, named = Path(path), _NamedState(pipe)
    group = named.group()
    content: dict[str, Any] = {"step": step, "steps": pipe.steps if isinstance(pipe, Pipeline) else step or 0}
    tensors: dict[str, Tensor] = {}
    PendingSave.finish()

    def collect() -> tuple[Any, ...]:
        path.mkdir(parents=True, exist_ok=True)
        tensors.update({f"model.{name}": copies[0] for name, copies in named.tensors.items()})
        values = {name: encode(value, f"values.{name}", tensors) for name, value in named.values.items()}
        groups, states = ([], {}) if optimizer is None else named.optimizer_content(optimizer, tensors)
        if named.rank == 0:
            content["extra"] = encode(extra, "extra", tensors)
            content["objects"] = {n: encode(_require_state(n, o), f"objects.{n}", tensors) for n, o in objects.items()}
        generators = encode(_generator_states(), f"random.{named.rank}", tensors)
        if asynchronous:
            tensors.update({name: t.clone() if t.is_cpu else t.cpu() for name, t in tensors.items()})
        return generators, values, states, groups

    collected = attempt(collect)

    def write() -> None:
        parts = gather_results(collected, f"the checkpoint {path} cannot be written", group)
        content["random"] = [part[0] for part in parts]
        content["values"] = {name: value for part in reversed(parts) for name, value in part[1].items()}
        if optimizer is not None:
            content["optimizer"] = {
                "class": type(optimizer).__name__,
                "groups": _merge_groups([part[3] for part in parts]),
                "states": {name: state for part in reversed(parts) for name, state in part[2].items()},
            }
        write_checkpoint(path, tensors, content, group)

    if asynchronous and collected[1] is None:
        return PendingSave(write)
    write()
    return None


def _check_number(name: str, number: Any, least: int) -> None:
    if number is not None and (type(number) is not int or number < least):
        raise PlanError(f"{name} is a number from {least} up, got {number!r}")


def load(path: str | Path, pipe: Model, optimizer: Optimizer | None = None, **objects: Any) -> Loaded:
    """Load a checkpoint into a pipeline with any cuts, schedule and mesh, or into a plain model.

    Create the optimizer and the ``objects`` as for the run that was saved, and pass the objects under the same names.
    Each rank reads its own tensors, and checks the files that it reads first. If the checkpoint does not fit, an error
    names the difference, and parameters and optimizer are unchanged. The ``objects`` are loaded last.
    """
    path, named = Path(path), _NamedState(pipe)
    manifest = read_manifest(path)
    for name, thing in objects.items():
        _require_state(name, thing)
        if name not in manifest.get("objects", {}):
            known = ", ".join(manifest.get("objects", {})) or "none"
            raise CheckpointError(f"the checkpoint {path} has no state of {name}: it has {known}")
    named.check(path, manifest)
    targets = {f"model.{name}": copies[0] for name, copies in named.tensors.items()}
    reader = _TensorReader(manifest, targets)
    states = None if optimizer is None else named.stored_states(optimizer, path, manifest, reader)
    given = {name: decode(manifest["objects"][name], reader.plain) for name in objects}
    values = {name: decode(value, reader.plain) for name, value in manifest["values"].items()}
    extra = decode(manifest.get("extra"), reader.plain)
    saved = manifest["random"]
    generators = decode(saved[named.rank] if named.rank < len(saved) else saved[0], reader.plain)
    reader.read(path)  # names and shapes were compared; this checks the files
    with torch.no_grad():
        for first, *copies in named.tensors.values():
            for copy in copies:
                copy.copy_(first)
    own = {name: value for name, value in values.items() if name in named.values}
    if own:
        pipe.load_state_dict(own, strict=False)
    with _malformed(path, "the optimizer's state"):
        if optimizer is not None and states is not None:
            _set_optimizer(optimizer, states, manifest["optimizer"]["groups"])
    for name, thing in objects.items():
        thing.load_state_dict(given[name])
    if isinstance(pipe, Pipeline):
        pipe.steps = manifest["steps"]
    with _malformed(path, "the state of the random generators"):
        _set_generators(generators, named.rank if named.rank >= len(saved) else None)
    return Loaded(path, manifest["step"], extra)


@contextmanager
def _malformed(path: Path, part: str) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"the checkpoint {path} is damaged: {part} is malformed ({error})") from error


class Checkpoints:
    """The checkpoints of a run in one folder: saves one every ``every`` steps, and keeps the newest ``keep``.

    ``step = checkpoints.load(pipe, optimizer, loader=loader)`` at the start of a script loads the newest checkpoint.
    ``checkpoints.save(step, pipe, optimizer, loader=loader)`` after each step saves the checkpoints that are due.

    After the first ``save``, SIGTERM (a preemption, the time limit of a SLURM job, a change of an elastic group) does
    not end the process. If any rank has received it, the next ``save`` writes a checkpoint on all ranks, and then ends
    them with the exit code ``PREEMPTED``. A second SIGTERM ends the process at once. A program's own handler is kept.
    """

    def __init__(self, folder: str | Path, *, every: int = 1, keep: int | None = None) -> None:
        _check_number("every", every, 1)
        _check_number("keep", keep, 1)
        self.folder, self.every, self.keep = Path(folder), every, keep
        self.preempted = False  # whether this process has received SIGTERM
        self._pending: PendingSave | None = None

    def paths(self) -> list[Path]:
        """The checkpoints that have a manifest, the newest first."""
        found = [path.parent for path in self.folder.glob(f"step-*/{MANIFEST}") if path.parent.name[5:].isdigit()]
        return sorted(found, key=lambda path: int(path.name[5:]), reverse=True)

    def latest(self) -> Path | None:
        """The newest checkpoint whose files are intact, or None. Damaged checkpoints are logged and skipped.

        Every file is read by one of the ranks. In a process group all ranks call it.
        """
        world = dist.group.WORLD if dist.is_initialized() else None
        rank, ranks = (0, 1) if world is None else (world.rank(), world.size())
        path: Path
        for path in gather(self.paths() if rank == 0 else None, world)[0]:
            problems = gather(_find_damage(path, rank, ranks), world)
            problem = next((text for text in problems if text is not None), None)
            if problem is None:
                return path
            if rank == 0:
                logger.warning("%s: it is left out", problem)
        return None

    def save(self, step: int, pipe: Model, optimizer: Optimizer | None = None, **options: Any) -> bool:
        """Save if ``step`` is a multiple of ``every``, and delete old checkpoints. Returns whether it has saved.

        ``options`` are those of ``ps.save``. It waits for an asynchronous save before the next one begins.
        """
        _check_number("step", step, 0)
        main = threading.current_thread() is threading.main_thread()
        if main and not self.preempted and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._preempt)
        stops = float(self.preempted)
        if isinstance(pipe, Pipeline):
            stops = pipe.max_over_ranks(stops)
        if step % self.every and not stops:
            return False
        self.wait()
        self._pending = save(self.folder / f"step-{step:08d}", pipe, optimizer, step=step, **options)
        if self._pending is None:
            self._delete_old()
        if stops:
            self.wait()
            logger.warning("preempted: the checkpoint of step %d is in %s", step, self.folder)
            raise SystemExit(PREEMPTED)
        return True

    def _preempt(self, *_: Any) -> None:
        self.preempted = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def load(self, pipe: Model, optimizer: Optimizer | None = None, **objects: Any) -> int:
        """Load the newest intact checkpoint; return its step, or 0 if there is none."""
        path = self.latest()
        return 0 if path is None else load(path, pipe, optimizer, **objects).step or 0

    def wait(self) -> None:
        """Wait for a checkpoint that is being written."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.wait()
            self._delete_old()

    def _delete_old(self) -> None:
        if self.keep is not None and not (dist.is_initialized() and dist.get_rank()):
            kept = self.paths()[: self.keep]
            for old in self.folder.glob("step-*"):
                # Without a manifest, a folder is what a save has left that failed or was killed.
                if old not in kept and old.name[5:].isdigit() and int(old.name[5:]) < int(kept[0].name[5:]):
                    (old / MANIFEST).unlink(missing_ok=True)  # first: a folder without a manifest is no checkpoint
                    shutil.rmtree(old, ignore_errors=True)


def _find_damage(path: Path, rank: int, ranks: int) -> str | None:
    """The first problem in this rank's part of the files of a checkpoint."""
    try:
        manifest = read_manifest(path)
        check_files(path, manifest, sorted(manifest["files"])[rank::ranks])
    except CheckpointError as error:
        return str(error)
    return None


# ── the state of a pipeline or a model ───────────────────────────────────────────────────────────────────────────────


class _NamedState:
    """The tensors of a pipeline's stages in this process, or of a plain model, by the plain model's names.

    A tied parameter is listed under the first of its names, and may have copies on several devices.
    """

    def __init__(self, pipe: Model) -> None:
        if not isinstance(pipe, (Pipeline, nn.Module)):
            raise PlanError(f"a checkpoint stores a ps.Pipeline or an nn.Module, got {type(pipe).__name__}")
        self.fqn: Callable[[str], str] = str
        self.mesh: Mesh | None = None
        if isinstance(pipe, Pipeline):
            self.fqn, self.mesh = pipe._fqn, pipe.mesh
            model, modules, ties = pipe._model, list(pipe._modules.values()), pipe.plan.ties
        else:
            model, modules, ties = pipe, [pipe], ()
        self.rank = 0 if self.mesh is None else self.mesh.world_ranks.index(self.mesh.rank)
        self.first_name: dict[str, str] = {}
        firsts: dict[int, str] = {}
        members = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
        for name, tensor in chain(*members):
            self.first_name[self.fqn(name)] = firsts.setdefault(id(tensor), self.fqn(name))
        for tie in ties:
            self.first_name |= dict.fromkeys(tie.names, self.first_name[tie.names[0]])
        self.tensors: dict[str, list[Tensor]] = {}
        self.values: dict[str, Any] = {}  # extra state of modules that is not a tensor
        self.names: dict[int, str] = {}  # of parameters, by identity
        for module in modules:
            for name, tensor in module.named_parameters(remove_duplicate=False):
                self.names[id(tensor)] = self._canonical_name(name)
            for name, value in module.state_dict().items():
                if isinstance(value, Tensor):
                    self.tensors.setdefault(self._canonical_name(name), []).append(value)
                else:
                    self.values[self.fqn(name)] = value
        for name, tensor in model.named_parameters(remove_duplicate=False):
            self.names.setdefault(id(tensor), self._canonical_name(name))
        saved = [name for name, value in model.state_dict().items() if isinstance(value, Tensor)]
        self.expected = set(map(self._canonical_name, saved))

    def _canonical_name(self, name: str) -> str:
        return self.first_name.get(self.fqn(name), self.fqn(name))

    def group(self) -> dist.ProcessGroup | None:
        """A gloo group of the mesh's processes, used only for checkpoints, so that a thread may use it."""
        if self.mesh is None:
            return None
        group = _groups.get(self.mesh, lambda: None)()
        if group is None:
            ranks = list(self.mesh.world_ranks)
            part = len(ranks) < dist.get_world_size()
            group = dist.new_group(ranks, backend="gloo", use_local_synchronization=part)
            _groups[self.mesh] = weakref.ref(group)
        return group

    def check(self, path: Path, manifest: Mapping[str, Any]) -> None:
        """Raise an error if the checkpoint is of another model."""
        stored = {name.removeprefix("model.") for name in manifest["tensors"] if name.startswith("model.")}
        missing, unexpected = sorted(self.expected - stored), sorted(stored - self.expected)
        if missing or unexpected:
            raise CheckpointError(
                f"the checkpoint {path} is of another model: it lacks {_listed(missing)} and has {_listed(unexpected)}"
            )
        for name, (tensor, *_) in self.tensors.items():
            if tensor.is_meta:
                raise PlanError(f"{name} is on the meta device, without memory to load into: call model.to_empty(…)")
            shape = manifest["tensors"][f"model.{name}"][1]
            if shape != [*tensor.shape]:
                text = f"{name} has the shape {tuple(shape)} in it and {tuple(tensor.shape)} here"
                raise CheckpointError(f"the checkpoint {path} is of another model: {text}")

    # ── optimizer ────────────────────────────────────────────────────────────────────────────────────────────────

    def _parameters(self, optimizer: Optimizer) -> list[list[tuple[str, Tensor]]]:
        """The optimizer's parameters by group, with their names."""
        if not isinstance(optimizer, Optimizer):
            raise PlanError(f"the optimizer is a {type(optimizer).__name__}: pass others by name, lr_scheduler=…")
        if isinstance(optimizer, LBFGS):
            raise PlanError("LBFGS keeps one state for all its parameters, which cannot be divided by name")
        found: list[list[tuple[str, Tensor]]] = []
        for number, group in enumerate(optimizer.param_groups):
            found.append([])
            for parameter in group["params"]:
                if id(parameter) in self.names:
                    found[-1].append((self.names[id(parameter)], parameter))
                elif parameter.numel():  # a rank without parameters has an empty one
                    shape = tuple(parameter.shape)
                    raise PlanError(
                        f"a parameter of shape {shape} in group {number} of the optimizer is not one of the "
                        "pipeline's: make the optimizer from pipe.parameters() or pipe.named_parameters()"
                    )
        return found

    def optimizer_content(self, optimizer: Optimizer, tensors: dict[str, Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """The options and parameter names of each group, and the state of each parameter by name."""
        groups, states = [], dict[str, Any]()
        for parameters, group in zip(self._parameters(optimizer), optimizer.param_groups, strict=True):
            options = {k: v.item() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
            groups.append([encode(options, "optimizer", {}), [name for name, _ in parameters]])
            for name, parameter in parameters:
                if name not in states and parameter in optimizer.state:
                    states[name] = encode(dict(optimizer.state[parameter]), f"optimizer.{name}", tensors)
        return groups, states

    def stored_states(
        self, optimizer: Optimizer, path: Path, manifest: Mapping[str, Any], reader: _TensorReader
    ) -> dict[Tensor, Any]:
        """The states of this process's parameters in the checkpoint. Their tensors are read later."""
        stored = manifest.get("optimizer")
        if stored is None:
            raise CheckpointError(f"the checkpoint {path} has no optimizer state: pass no optimizer")
        if stored["class"] != type(optimizer).__name__:
            kinds = f"{stored['class']}, but the optimizer is {type(optimizer).__name__}"
            raise CheckpointError(f"the checkpoint {path} has the state of {kinds}")
        here = self._parameters(optimizer)
        if len(here) != len(stored["groups"]):
            counts = f"{len(stored['groups'])} parameter groups, but the given one has {len(here)}"
            raise CheckpointError(f"the optimizer of the checkpoint {path} has {counts}")
        states: dict[Tensor, Any] = {}
        for number, (row, (_, names)) in enumerate(zip(here, stored["groups"], strict=True)):
            group = optimizer.param_groups[number]
            left_out = sorted({name for name in names if name in self.tensors} - {name for name, _ in row})
            if left_out:
                where = f"group {number} of the optimizer in the checkpoint {path}"
                raise CheckpointError(f"{_listed(left_out)} of {where} is not in group {number} of the given one")
            for name, parameter in row:
                if name not in names:
                    raise CheckpointError(f"{name} is in group {number} of the optimizer, but in another in {path}")
                if name in stored["states"]:
                    make = reader.like(parameter, bool(group.get("fused") or group.get("capturable")))
                    states[parameter] = decode(stored["states"][name], make)
        return states


def _merge_groups(rows: list[list[Any]]) -> list[Any]:
    """Merge the parameter groups of all ranks: the options of one rank, and the parameter names of all ranks."""
    if len({len(row) for row in rows}) > 1:
        raise PlanError(f"the ranks' optimizers have different numbers of groups: {[len(row) for row in rows]}")
    merged = []
    for same in zip(*rows, strict=True):
        names = dict.fromkeys(name for _, names in same for name in names)
        merged.append([same[0][0], list(names)])
    return merged


def _set_optimizer(optimizer: Optimizer, states: Mapping[Tensor, Any], groups: list[Any]) -> None:
    """Load states and the options of groups. Tensors keep the dtype with which they were saved."""
    packed, number = optimizer.state_dict(), 0
    packed["state"] = {}
    for group, (options, _), own in zip(packed["param_groups"], groups, optimizer.param_groups, strict=True):
        for key, value in decode(options, _no_tensor).items():
            if key not in ("foreach", "fused", "capturable", "differentiable"):  # these select an implementation
                before = group.get(key)
                group[key] = torch.full_like(before, value) if isinstance(before, Tensor) else value
        for parameter in own["params"]:
            if parameter in states:
                packed["state"][number] = states[parameter]
            number += 1
    optimizer.load_state_dict(packed)
    for parameter, state in states.items():  # load_state_dict has converted them to the parameter's dtype
        for key, value in state.items():
            now = optimizer.state[parameter].get(key)
            if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype != value.dtype:
                optimizer.state[parameter][key] = value


def _no_tensor(name: str) -> Tensor:
    raise CheckpointError(f"the manifest has a tensor, {name}, among the options of an optimizer")


class _TensorReader:
    """Creates the tensors into which a checkpoint is read."""

    def __init__(self, manifest: Mapping[str, Any], targets: dict[str, Tensor]) -> None:
        self.manifest, self.targets = manifest, targets
        self.copies: list[tuple[str, Tensor]] = []

    def _meta(self, name: Any) -> tuple[torch.dtype, list[int]]:
        if name not in self.manifest["tensors"]:
            raise CheckpointError(f"the manifest names a tensor that the checkpoint does not have: {name}")
        dtype, shape, _ = self.manifest["tensors"][name]
        return getattr(torch, dtype), shape

    def plain(self, name: str) -> Tensor:
        dtype, shape = self._meta(name)
        if name not in self.targets:
            self.targets[name] = torch.empty(shape, dtype=dtype)
        return self.targets[name]

    def like(self, parameter: Tensor, scalars_on_device: bool) -> Callable[[str], Tensor]:
        """Creates tensors with the device and sharding of a parameter; scalars on the CPU or, if set, on the device."""

        def make(name: str) -> Tensor:
            dtype, shape = self._meta(name)
            if is_dtensor(parameter) and shape == [*parameter.shape]:
                made = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
            else:
                host = not shape and not scalars_on_device
                made = torch.empty(shape, dtype=dtype, device="cpu" if host else parameter.device)
            if name in self.targets:  # the state of another copy of a tied parameter
                self.copies.append((name, made))
            self.targets.setdefault(name, made)
            return made

        return make

    def read(self, path: Path) -> None:
        read_tensors(path, self.manifest, self.targets)
        for name, copy in self.copies:
            copy.copy_(self.targets[name])


def _require_state(name: str, thing: Any) -> Any:
    if not callable(getattr(thing, "state_dict", None)) or not callable(getattr(thing, "load_state_dict", None)):
        raise PlanError(f"{name} is a {type(thing).__name__} without state_dict and load_state_dict: use extra= for it")
    return thing.state_dict()


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:5])} and {len(names) - 5} more" if len(names) > 5 else ", ".join(names) or "nothing"


# ── random generators ────────────────────────────────────────────────────────────────────────────────────────────────


def _generator_states() -> dict[str, Any]:
    numpy: Any = sys.modules.get("numpy")
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": None if numpy is None else numpy.random.get_state(),
    }


def _set_generators(states: Mapping[str, Any], new_rank: int | None) -> None:
    """Set the generators. A rank that did not exist in the saved run seeds them from the first rank's state."""
    if new_rank is not None:
        digest = hashlib.sha256(bytes(states["torch"].tolist()) + str(new_rank).encode()).digest()
        seed = int.from_bytes(digest[:4], "little")
        torch.manual_seed(seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed)
        return
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])
    random.setstate(states["python"])
    if states["numpy"] is not None and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(states["numpy"])
