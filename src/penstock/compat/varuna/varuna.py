"""``Varuna``: a model with ``CutPoint``s, one process per stage and replica.

``stage_to_rank_map="0,2;1,3;"`` has two stages: the first on ranks 0 and 2, the second on 1 and 3. The n-th ranks of
all stages form the n-th pipeline: 0 → 1 and 2 → 3.
"""

from __future__ import annotations

import math
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import penstock as ps
from penstock import hooks

__all__ = ["Varuna", "get_this_rank_config_varuna", "get_varuna_config"]


def parse_stage_to_rank_map(stage_to_rank_map: str) -> dict[int, list[int]]:
    """The ranks of each stage in order: the same number for each stage, and each rank once."""
    try:
        stages = stage_to_rank_map.strip().rstrip(";").split(";")
        rows = [[int(rank) for rank in stage.split(",")] for stage in stages]
    except (AttributeError, ValueError):
        raise ps.PlanError(
            f"stage_to_rank_map says which ranks run each stage, as in '0,2;1,3;', got {stage_to_rank_map!r}"
        ) from None
    counts, ranks = [len(row) for row in rows], [rank for row in rows for rank in row]
    if len(set(counts)) > 1 or len(set(ranks)) < len(ranks) or min(ranks) < 0:
        raise ps.PlanError(
            "every stage must have equally many ranks, and every rank has one stage and is a number from 0 on, but "
            f"{stage_to_rank_map!r} has {counts} ranks"
        )
    return dict(enumerate(rows))


def get_varuna_config(stage_to_rank_map: str) -> tuple[int, int]:
    """The number of stages and of replicas."""
    stages = parse_stage_to_rank_map(stage_to_rank_map)
    return len(stages), len(stages[0])


def get_this_rank_config_varuna(stage_to_rank_map: str, rank: int) -> tuple[int, int]:
    """The stage of a rank and the number of its replica."""
    for stage, ranks in parse_stage_to_rank_map(stage_to_rank_map).items():
        if rank in ranks:
            return stage, ranks.index(rank)
    raise RuntimeError(f"rank {rank} is not in stage_to_rank_map {stage_to_rank_map!r}: only its ranks run a stage")


def positive(name: str, number: Any) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ps.PlanError(f"{name} must be a whole number of samples from 1, got {number!r}")
    return number


def check_model(model: Any, fp16: bool) -> None:
    """Check that the model is on the CPU and, for ``fp16``, has float32 parameters."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type != "cpu":
            raise AssertionError(f"the model must be on the CPU, where it is cut, but {name} is on {tensor.device}")
        if fp16 and isinstance(tensor, nn.Parameter) and tensor.dtype is torch.float16:
            raise ps.PlanError(f"fp16=True computes in float16 from parameters in float32, but {name} is in float16")


def device_of(device: int | str | torch.device, local_rank: int = -1) -> torch.device | str:
    """The device of a number: the GPU with this number, or the CPU without GPUs."""
    if not isinstance(device, int):
        return device
    if not torch.cuda.is_available():
        return "cpu"
    number = device if device >= 0 else local_rank
    return f"cuda:{number}" if number >= 0 else "cuda"


class Varuna(nn.Module):
    """Trains a model that computes its loss, cut at some of its ``CutPoint``s, on the ranks of ``stage_to_rank_map``.

    The third argument is a sample call of the model: a dict of keyword arguments (``dry_run_input``), or a function
    ``get_batch_fn(size, device)`` that returns one. ``batch_size`` is the size of a mini-batch over all replicas, and
    ``chunk_size`` that of a micro-batch. This module has the parameters of this rank's stage, under the model's names.
    """

    def __init__(
        self,
        model: nn.Module,
        stage_to_rank_map: str,
        get_batch_fn: Any = None,
        batch_size: int | None = None,
        chunk_size: int | None = None,
        fp16: bool = False,
        local_rank: int = -1,
        device: int | str | torch.device = -1,
        shared_weights: Sequence[Sequence[str]] | None = None,
        from_cache: bool = True,
        *,
        dry_run_input: Any = None,
    ) -> None:
        super().__init__()
        samples, chunk = positive("batch_size", batch_size), positive("chunk_size", chunk_size)
        check_model(model, fp16)
        self.stage_to_rank_map = parse_stage_to_rank_map(stage_to_rank_map)
        own_device = device_of(device, local_rank)
        if not dist.is_initialized():
            ps.init(own_device)
        self.rank = dist.get_rank()
        self.stage, self.rank_within_stage = get_this_rank_config_varuna(stage_to_rank_map, self.rank)
        world = dist.get_world_size()
        if max(map(max, self.stage_to_rank_map.values())) >= world:
            raise ps.PlanError(f"stage_to_rank_map is {stage_to_rank_map!r}, but the world has {world} ranks")
        self.local_rank = self.rank if local_rank == -1 else local_rank
        self.partitions, self.data_depth = len(self.stage_to_rank_map), len(self.stage_to_rank_map[0])
        self.data_parallel = self.data_depth > 1
        self.batch_size, self.micro_batch_size = -(-samples // self.data_depth), chunk
        self.fp16, self.iteration = fp16, 0
        if self.partitions > 1 and not hooks.cut_points(model):
            kind = type(model).__name__
            raise ps.PlanError(f"{kind} has no CutPoint: it cannot be cut into {self.partitions} stages")
        if (get_batch_fn is None) == (dry_run_input is None):
            ways = "dry_run_input, a dict, or get_batch_fn(size, device)"
            raise ps.PlanError(f"pass one of two arguments that say how the model is called: {ways}")
        call = dry_run_input if get_batch_fn is None else get_batch_fn
        sample = call(1, device="cpu") if callable(call) else call
        plan = ps.split(model, stages=self.partitions, balance="uniform", sample=sample, shared_weights=shared_weights)
        self._layers = list(plan.require_chain().layers)
        self._saved_as, self._cut_of = _saved_names(plan)
        replicas = zip(*self.stage_to_rank_map.values(), strict=True)
        group = [rank for replica in replicas for rank in replica]
        mesh = ps.Mesh(data=self.data_depth, pipe=self.partitions, group=group, device=own_device)
        self.device = mesh.device
        self.pipeline = ps.Pipeline(
            plan,
            lambda output: output[0] if isinstance(output, (tuple, list)) else hooks.find_loss(output),
            microbatches=-(-self.batch_size // chunk),
            microbatch_size=chunk,
            mesh=mesh,
            recompute=dict.fromkeys(range(self.partitions - 1), "always"),
            outputs=None,
        )
        self.partitioned_model = self.pipeline.stage_modules[self.stage]
        self.optimizer: Optimizer | None = None
        self._scaler: ps.GradScaler | None = None
        # The scaler unscales all gradients of this rank, also of parameters that are not in the program's optimizer.
        own = list(self.pipeline.parameters())
        self._all_parameters = SGD(own, lr=0.0) if own else None

    def set_optimizer(
        self,
        optimizer: Optimizer,
        loss_scale: str | float = "dynamic",
        init_loss_scale: float = 2.0**20,
        min_loss_scale: float | None = 1.0,
    ) -> None:
        """Set the optimizer that is saved in checkpoints and, with ``fp16``, the loss scale.

        A dynamic scale starts at ``init_loss_scale``, grows while gradients are finite and shrinks otherwise, but not
        below ``min_loss_scale``. A number is a constant scale.
        """
        options: dict[str, Any] = {"init_scale": init_loss_scale, "min_scale": min_loss_scale}
        if loss_scale != "dynamic":
            if not isinstance(loss_scale, (int, float)) or isinstance(loss_scale, bool):
                raise ps.PlanError(f"loss_scale must be 'dynamic' or a number, got {loss_scale!r}")
            options = {"init_scale": loss_scale, "min_scale": loss_scale, "growth_interval": 2**62}
        self.optimizer, self._constant_scale = optimizer, loss_scale != "dynamic"
        if self.fp16:
            self._scaler = ps.GradScaler(self.pipeline, **options)

    def step(self, inputs: Mapping[str, Any], clip_grad_max_norm: float | None = None) -> tuple[float, bool, float]:
        """Forward and backward of a mini-batch; return the loss, whether gradients overflowed, and their norm.

        The results are the same on all ranks. ``inputs`` are this replica's part of the mini-batch, the same on all of
        its ranks. Every micro-batch gets a tensor of one sample. Gradients are accumulated. If they overflow, they are
        dropped, and the norm is nan.
        """
        value, scaler = _arguments(inputs), self._scaler
        overflow = False
        if not self.fp16:
            loss = self.pipeline.step(value).loss
        elif scaler is None:
            raise ps.PlanError("with fp16=True the loss is scaled: call set_optimizer(optimizer) before step")
        else:
            for parameter in self.pipeline.parameters():
                if parameter.grad is not None:  # of earlier steps
                    parameter.grad.mul_(scaler.get_scale())
            overflow = True
            try:
                with torch.autocast(self.device.type, torch.float16):
                    loss = self.pipeline.step(value).loss
                scaler.unscale_(self._all_parameters)
                overflow = scaler.update()
            finally:
                if overflow:
                    self.pipeline.zero_grad()
        if overflow:
            norm = math.nan
        elif clip_grad_max_norm is None:
            norm = float(self.pipeline.grad_norm())
        else:
            norm = float(self.pipeline.clip_grad_norm_(clip_grad_max_norm))
        self.iteration += 1
        return float(loss), overflow, norm

    def evaluate(self, inputs: Mapping[str, Any], batch_size: int | None = None) -> float:
        """The loss of a mini-batch of any size, without gradients; the same on all ranks."""
        with torch.autocast(self.device.type, torch.float16, enabled=self.fp16):
            return float(self.pipeline.evaluate(_arguments(inputs)).loss)

    def get_loss_scale(self) -> float:
        """The loss scale; 1.0 without ``fp16``."""
        return 1.0 if self._scaler is None else self._scaler.get_scale()

    def forward(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("Varuna has no forward alone: call step(inputs) to train, evaluate(inputs) to evaluate")

    def checkpoint(
        self, global_store: str | Path, step: int | None = None, tempdir: str | Path | None = None, shard: bool = False
    ) -> Future[None] | None:
        """Write a checkpoint to ``global_store``, a folder that all ranks share. Its files are the same at any depth:

            varuna_ckpt_<step>/opt-fp32-params-<cut>    parameters and buffers, by the model's names
                               opt-state-<cut>          the optimizer state of these parameters
                               opt-common-state         optimizer options, loss scale, the ranks that write
                               markers/complete_<rank>.txt

        A cut is the part of the model between two CutPoints, active or not. Every rank calls it, after
        ``set_optimizer``. The first replica writes; with ``shard``, the replicas write some of the cuts each. With
        ``tempdir`` it returns a future, which is done.
        """
        step = self.iteration if step is None else step
        folder = Path(global_store) / f"varuna_ckpt_{step}"
        writers = [rank for ranks in self.stage_to_rank_map.values() for rank in (ranks if shard else ranks[:1])]
        _, packed, numbered = self._optimizer_state()
        state = self.pipeline.state_dict()

        def begin() -> None:
            if self.rank == writers[0]:
                shutil.rmtree(folder / "markers", ignore_errors=True)  # an earlier checkpoint of the same step
                (folder / "markers").mkdir(parents=True)

        def write() -> None:
            if self.rank not in writers:
                return
            values = {self._saved_as[name]: tensor for name, tensor in state.items()}
            states = {name: packed["state"][i] for i, name in numbered if i in packed["state"]}
            own = [self._layers.index(layer) for layer in self.pipeline.plan.groups[self.stage]]
            for cut in own[self.rank_within_stage :: self.data_depth] if shard else own:
                names = [name for name in values if self._cut_of[name] == cut]
                _save({name: values[name] for name in names}, folder / f"opt-fp32-params-{cut}")
                _save({name: states[name] for name in names if name in states}, folder / f"opt-state-{cut}")
            if self.rank == writers[0]:
                skipped = ("params", "param_names")
                groups = [{k: v for k, v in group.items() if k not in skipped} for group in packed["param_groups"]]
                scaler = {} if self._scaler is None else self._scaler.state_dict()
                common = {"step": step, "cuts": len(self._layers), "writers": writers}
                _save({**common, "groups": groups, "scaler": scaler}, folder / "opt-common-state")
            (folder / "markers" / f"complete_{self.rank}.txt").write_text("complete\n")

        self._on_all_ranks(begin, f"begin {folder}")
        self._on_all_ranks(write, f"write {folder}")
        done: Future[None] = Future()
        done.set_result(None)
        return None if tempdir is None else done

    def load_checkpoint(self, global_store: str | Path, iteration: int, check_complete: bool = True) -> None:
        """Resume from a checkpoint of any depth: parameters, buffers, optimizer state and loss scale.

        Every rank calls it, after ``set_optimizer``.
        """
        folder = Path(global_store) / f"varuna_ckpt_{iteration}"
        optimizer, packed, numbered = self._optimizer_state()
        saved = {name: self._saved_as[name] for name in self.pipeline.state_dict()}
        values: dict[str, Tensor] = {}
        states: dict[str, Any] = {}

        def read() -> Any:
            if not folder.is_dir():
                there = sorted(path.name for path in folder.parent.glob("varuna_ckpt_*"))
                raise ps.PlanError(f"{folder.parent} has no checkpoint {folder.name}: there are {there}")
            common = _load(folder / "opt-common-state")
            missing = [rank for rank in common["writers"] if not (folder / "markers" / f"complete_{rank}.txt").exists()]
            if check_complete and missing:
                raise ps.PipelineError(f"{folder} is not complete: ranks {missing} have not finished, use an older one")
            if common["cuts"] != len(self._layers):
                parts = f"{common['cuts']} parts between its cut points, but this one has {len(self._layers)}"
                raise ps.PlanError(f"the checkpoint {folder} is of a model with {parts}")
            for cut in sorted({self._cut_of[name] for name in saved.values()}):
                values.update(_load(folder / f"opt-fp32-params-{cut}"))
                states.update(_load(folder / f"opt-state-{cut}"))
            lacking = [name for name in saved.values() if name not in values]
            if lacking:
                raise ps.PlanError(f"the checkpoint {folder} has no {lacking[0]}: it is of another model")
            return common

        common = self._on_all_ranks(read, f"read {folder}")
        self.pipeline.load_state_dict({name: values[one] for name, one in saved.items()})
        self.iteration = iteration
        ours, theirs = packed["param_groups"], common["groups"]
        if len(ours) != len(theirs):
            groups = f"{len(ours)} groups of parameters, but the checkpoint's had {len(theirs)}"
            raise ps.PlanError(f"the optimizer has {groups}: make the same groups on every rank, empty ones too")
        for group, options in zip(ours, theirs, strict=True):
            group.update(options)
        packed["state"] = {i: states[name] for i, name in numbered if name in states}
        optimizer.load_state_dict(packed)
        if self._scaler is not None and common["scaler"] and not self._constant_scale:
            self._scaler.load_state_dict(common["scaler"])

    def _optimizer_state(self) -> tuple[Optimizer, dict[str, Any], list[tuple[int, str]]]:
        """The optimizer, its ``state_dict``, and the index and the name in checkpoints of its parameters."""
        if self.optimizer is None:
            raise ps.PlanError("a checkpoint has the optimizer's state: call set_optimizer(optimizer) before")
        names = {id(parameter): self._saved_as.get(name) for name, parameter in self.pipeline.named_parameters()}
        saved = [names.get(id(parameter)) for group in self.optimizer.param_groups for parameter in group["params"]]
        numbered = [(i, name) for i, name in enumerate(saved) if name is not None]
        return self.optimizer, self.optimizer.state_dict(), numbered

    def _on_all_ranks(self, work: Callable[[], Any], purpose: str) -> Any:
        """The result of ``work``. If it fails on any rank, raise an error on all ranks."""
        try:
            result = work()
        except Exception:
            with suppress(ps.PipelineError):  # the error of another rank, which failed before
                self.pipeline.max_over_ranks(1.0)
            raise
        if self.pipeline.max_over_ranks(0.0):
            raise ps.PipelineError(f"another rank could not {purpose}: see its error")
        return result

    def named_parameters(self, prefix: str = "", *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank's stage, under the model's names."""
        for name, parameter in self.pipeline.named_parameters():
            yield f"{prefix}.{name}" if prefix else name, parameter

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """The buffers of this rank's stage, under the model's names."""
        yield from self.partitioned_model.named_buffers(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """The parameters and buffers of this rank's stage, under the model's names."""
        return self.pipeline.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:  # type: ignore[override]
        """Load this rank's part of the state of the whole model, or of this stage."""
        self.pipeline.load_state_dict(state_dict, strict)

    def train(self, mode: bool = True) -> Varuna:
        self.pipeline.train(mode)
        return super().train(mode)


def _arguments(inputs: Any) -> dict[str, Any]:
    """The model's keyword arguments. Every micro-batch gets the tensors of one sample, if others are larger."""
    if not isinstance(inputs, Mapping):
        raise ps.PlanError(f"inputs must be a dict of the model's keyword arguments, got {type(inputs).__name__}")
    leaves, spec = hooks.tree_flatten(dict(inputs))
    sizes = {i: leaf.shape[0] for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.dim()}
    if any(size != 1 for size in sizes.values()):
        leaves = [ps.Broadcast(leaf) if sizes.get(i) == 1 else leaf for i, leaf in enumerate(leaves)]
    return hooks.tree_unflatten(leaves, spec)  # type: ignore[no-any-return]


def _saved_names(plan: ps.Plan) -> tuple[dict[str, str], dict[str, int]]:
    """The name under which each tensor is saved (the first of its names), and the first cut that contains it."""
    chain = plan.require_chain()
    saved_as: dict[str, str] = {}
    cut_of: dict[str, int] = {}
    first: dict[int, str] = {}
    for number, layer in enumerate(chain.layers):
        for name, tensor in chain.members(layer):
            saved_as.setdefault(name, first.setdefault(id(tensor), name))
            cut_of.setdefault(saved_as[name], number)
    for tie in plan.ties:
        one = min((saved_as[name] for name in tie.names), key=cut_of.__getitem__)
        saved_as.update(dict.fromkeys(tie.names, one))
    return saved_as, cut_of


def _load(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        raise ps.PipelineError(f"{file} cannot be read, take an earlier checkpoint: {error}") from error


def _save(value: Any, file: Path) -> None:
    """Save tensors from the host, and NumPy numbers as Python numbers, which ``weights_only`` requires."""
    leaves, spec = hooks.tree_flatten(value)
    tensors = [leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    plain = [leaf.item() if type(leaf).__module__ == "numpy" else leaf for leaf in tensors]
    torch.save(hooks.tree_unflatten(plain, spec), file)
