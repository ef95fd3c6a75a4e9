"""``Varuna``: a model with ``CutPoint``s, one process per stage and replica."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from penstock.compat.varuna import checkpoint
from penstock.compat.varuna.checkpoint import Cuts
from penstock.compat.varuna.inputs import arguments_of, check_model, device_of, loss_of, positive, sample_of
from penstock.compat.varuna.utils import StageToRankMap, get_this_rank_config_varuna, parse_stage_to_rank_map
from penstock.errors import PipelineError, PlanError
from penstock.split import split
from penstock.split.marks import cut_points
from penstock.engine.executor import GradStash
from penstock.train.launch import init, is_initialized
from penstock.train.mesh import Mesh
from penstock.train.pipeline import Pipeline
from penstock.train.scaler import GradScaler

__all__ = ["Varuna"]

_NEVER = 2**62  # steps after which a constant loss scale would grow


class Varuna(nn.Module):
    """Trains a model that computes its loss, cut at some of its ``CutPoint``s, as ``stage_to_rank_map`` says.

    The third argument says how the model is called: by keyword arguments as in a dict (``dry_run_input``), or as
    ``get_batch_fn(size, device)`` gives them. ``batch_size`` is that of a mini-batch, over all replicas; ``chunk_size``
    that of a micro-batch. Every rank has its own stage: its parameters, under the model's names, are this module's.
    """

    def __init__(
        self,
        model: nn.Module,
        stage_to_rank_map: StageToRankMap,
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
        where = device_of(device, local_rank)
        if not is_initialized():
            init(where)
        self.rank = dist.get_rank()
        self.stage, self.rank_within_stage = get_this_rank_config_varuna(stage_to_rank_map, self.rank)
        world = dist.get_world_size()
        if max(map(max, self.stage_to_rank_map.values())) >= world:
            raise PlanError(f"stage_to_rank_map is {stage_to_rank_map!r}, but the world has {world} ranks")
        self.local_rank = self.rank if local_rank == -1 else local_rank
        self.partitions, self.data_depth = len(self.stage_to_rank_map), len(self.stage_to_rank_map[0])
        self.data_parallel = self.data_depth > 1
        self.batch_size, self.micro_batch_size = -(-samples // self.data_depth), chunk
        self.fp16, self.iteration = fp16, 0
        if self.partitions > 1 and not cut_points(model):
            raise PlanError(f"{type(model).__name__} has no CutPoint: it cannot be cut into {self.partitions} stages")
        sample = sample_of(get_batch_fn, dry_run_input)
        plan = split(model, stages=self.partitions, balance="uniform", sample=sample, shared_weights=shared_weights)
        self._cuts = Cuts.of(plan)
        replicas = zip(*self.stage_to_rank_map.values(), strict=True)
        mesh = Mesh(
            data=self.data_depth,
            pipe=self.partitions,
            group=[rank for replica in replicas for rank in replica],
            device=where,
        )
        self.device = mesh.device
        self.pipeline = Pipeline(
            plan,
            loss_of,
            microbatches=-(-self.batch_size // chunk),
            microbatch_size=chunk,
            mesh=mesh,
            recompute=dict.fromkeys(range(self.partitions - 1), "always"),
            outputs=None,
        )
        self.partitioned_model = self.pipeline.stage_modules[self.stage]
        self.optimizer: Optimizer | None = None
        self._scaler: GradScaler | None = None
        self._constant = False  # the loss scale
        # What the scaler divides are all gradients of this rank, whatever the program's optimizer has.
        own = list(self.pipeline.parameters())
        self._gradients = SGD(own, lr=0.0) if own else None
        self._copies = ThreadPoolExecutor(1, thread_name_prefix="penstock checkpoint")  # has no thread until it is used
        self._copying: Future[None] | None = None
        self._loaded: checkpoint.Loaded | None = None  # what an optimizer that comes later goes on from

    # ── training ─────────────────────────────────────────────────────────────────────────────────────────────

    def set_optimizer(
        self,
        optimizer: Optimizer,
        loss_scale: str | float = "dynamic",
        init_loss_scale: float = 2.0**20,
        min_loss_scale: float | None = 1.0,
    ) -> None:
        """The optimizer of this rank's parameters, to be saved with them; with ``fp16``, how the loss is scaled.

        The scale begins at ``init_loss_scale``, grows while gradients are finite and falls, not below
        ``min_loss_scale``, where they are not; or it is the number ``loss_scale``.
        """
        numbers: dict[str, Any] = {"init_scale": init_loss_scale, "min_scale": min_loss_scale}
        if loss_scale != "dynamic":
            if not isinstance(loss_scale, (int, float)) or isinstance(loss_scale, bool):
                raise PlanError(f"loss_scale must be 'dynamic' or a number, got {loss_scale!r}")
            numbers = {"init_scale": loss_scale, "min_scale": loss_scale, "growth_interval": _NEVER}
        self.optimizer, self._constant = optimizer, loss_scale != "dynamic"
        if self.fp16:
            self._scaler = GradScaler(self.pipeline, **numbers)
        self._resume()

    def step(self, inputs: Mapping[str, Any], clip_grad_max_norm: float | None = None) -> tuple[float, bool, float]:
        """Forward and backward of a mini-batch: its loss, whether gradients overflowed, and their norm.

        All three are the same on every rank. ``inputs`` are this replica's share, the same on all of its ranks; a
        tensor of one sample goes to every micro-batch. Gradients are added to those that are there; where they overflow
        they are dropped, and have no norm (nan).
        """
        value = arguments_of(inputs)
        loss, overflow = self._half(value) if self.fp16 else (self.pipeline.step(value).loss, False)
        if overflow:
            norm = math.nan
        elif clip_grad_max_norm is None:
            norm = float(self.pipeline.grad_norm())
        else:
            norm = float(self.pipeline.clip_grad_norm_(clip_grad_max_norm))
        self.iteration += 1
        return float(loss), overflow, norm

    def _half(self, value: Any) -> tuple[Tensor, bool]:
        """A step in half precision, and whether its gradients are not finite: then they are dropped."""
        if self._scaler is None:
            raise PlanError("with fp16=True the loss is scaled: call set_optimizer(optimizer) before step")
        stash = GradStash(self.pipeline.parameters(), apart=True)
        overflow = True
        try:
            with torch.autocast(self.device.type, torch.float16):
                loss: Tensor = self.pipeline.step(value).loss
            self._scaler.unscale_(self._gradients)
            overflow = self._scaler.update()
        finally:
            if overflow:
                stash.restore()
            else:
                stash.add_back(None)
        return loss, overflow

    def evaluate(self, inputs: Mapping[str, Any], batch_size: int | None = None) -> float:
        """The loss of a mini-batch of any size, without gradients; the same on every rank."""
        with torch.autocast(self.device.type, torch.float16, enabled=self.fp16):
            return float(self.pipeline.evaluate(arguments_of(inputs)).loss)

    def get_loss_scale(self) -> float:
        """What gradients are multiplied by while they are computed; 1.0 without ``fp16``."""
        return 1.0 if self._scaler is None else self._scaler.get_scale()

    def forward(self, *args: Any, **kwargs: Any) -> None:
        """There is no forward alone."""
        raise RuntimeError("Varuna has no forward alone: call step(inputs) to train, evaluate(inputs) to evaluate")

    # ── checkpoints ──────────────────────────────────────────────────────────────────────────────────────────

    def checkpoint(
        self, global_store: str | Path, step: int | None = None, tempdir: str | Path | None = None, shard: bool = False
    ) -> Future[None] | None:
        """Write ``varuna_ckpt_<step>`` to ``global_store``, where every rank finds it: one file for each cut.

        All ranks call it. With ``tempdir``, a folder of this machine, files are written there, and copied to the
        store while training goes on: the future is done when this rank's are. With ``shard`` every replica writes
        a part.
        """
        step = self.iteration if step is None else step
        if self._copying is not None:
            wait([self._copying])  # it may be of the same step
        folder = checkpoint.folder_of(global_store, step)
        first = self.stage == 0 and self.rank_within_stage == 0
        self._together(lambda: checkpoint.begin(folder) if first else None, f"begin {folder}")
        share = (self.rank_within_stage, self.data_depth) if shard else (0, 1)
        files: dict[str, Any] = {}
        writers = [ranks[d] for ranks in self.stage_to_rank_map.values() for d in range(share[1])]
        if self.rank in writers:
            own = self._cuts.of_layers(self.pipeline.plan.groups[self.stage])
            state = self.pipeline.state_dict()
            files = checkpoint.files(self._cuts, own, state, checkpoint.states_of(self._names(), self.optimizer), share)
        if first:
            files[checkpoint.COMMON] = {
                "step": step,
                "cuts": self._cuts.count,
                "writers": writers,
                "shards": share[1],
                "groups": checkpoint.options_of(self.optimizer),
                "scaler": {} if self._scaler is None else self._scaler.state_dict(),
            }
        if tempdir is None:
            self._together(lambda: checkpoint.write(folder, files, self.rank), f"write {folder}")
            return None
        there: list[Path] = []
        self._together(lambda: there.append(checkpoint.write_aside(tempdir, files)), f"write to {tempdir}")
        self._copying = self._copies.submit(checkpoint.copy, there[0], folder, self.rank, bool(files))
        return self._copying

    def load_checkpoint(self, global_store: str | Path, iteration: int, check_complete: bool = True) -> None:
        """Go on from a checkpoint of any depth: parameters, buffers, the optimizer's state and the loss scale.

        All ranks call it. An optimizer that is set later gets its state then.
        """
        folder = checkpoint.folder_of(global_store, iteration)
        found: list[checkpoint.Loaded] = []
        self._together(
            lambda: found.append(checkpoint.read(folder, self._cuts, self.pipeline.state_dict(), check_complete)),
            f"read {folder}",
        )
        (self._loaded,) = found
        self.pipeline.load_state_dict(self._loaded.state)
        self._loaded.state.clear()
        self.iteration = iteration
        if self.optimizer is not None:
            self._resume()

    def _resume(self) -> None:
        """Give what was loaded to the optimizer and the scaler, once."""
        loaded, self._loaded = self._loaded, None
        if loaded is None or self.optimizer is None:
            return
        checkpoint.restore(self.optimizer, self._names(), loaded)
        if self._scaler is not None and loaded.scaler and not self._constant:
            self._scaler.load_state_dict(loaded.scaler)

    def _names(self) -> dict[int, str]:
        """The names under which this rank's parameters are saved, by identity."""
        saved_as = self._cuts.saved_as
        return {id(p): saved_as[name] for name, p in self.pipeline.named_parameters() if name in saved_as}

    def _together(self, work: Callable[[], None], what: str) -> None:
        """Do it on every rank, or, where it fails on any, raise an error on all."""
        failure: Exception | None = None
        try:
            work()
        except Exception as error:
            failure = error
        if self.pipeline.agree(float(failure is not None)):
            raise failure or PipelineError(f"another rank could not {what}: see its error")

    # ── as a module ──────────────────────────────────────────────────────────────────────────────────────────

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank's stage, under the model's own names."""
        for name, parameter in self.pipeline.named_parameters():
            yield f"{prefix}.{name}" if prefix else name, parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The buffers of this rank's stage, under the model's own names."""
        yield from self.partitioned_model.named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The parameters and buffers of this rank's stage, under the model's own names."""
        if args or kwargs:
            raise PlanError("state_dict() of a Varuna model takes no arguments: it is no part of another module")
        return dict(self.pipeline.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> None:
        """Take this rank's part of a state of the whole model, or of this stage."""
        if assign:
            raise PlanError("assign=True would part the optimizer's parameters from the model's: leave it out")
        self.pipeline.load_state_dict(state_dict, strict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of this rank's stage."""
        self.pipeline.zero_grad(set_to_none)

    def train(self, mode: bool = True) -> Varuna:
        """Put this rank's stage into training mode, or out of it."""
        super().train(mode)
        self.pipeline.train(mode)
        return self
