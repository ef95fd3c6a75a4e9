"""``Varuna``: a model with ``CutPoint``s, one process per stage and replica."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import penstock as ps
from penstock import hooks
from penstock.compat.varuna import checkpoint
from penstock.compat.varuna.utils import (
    StageToRankMap,
    check_model,
    device_of,
    get_this_rank_config_varuna,
    parse_stage_to_rank_map,
    positive,
)

__all__ = ["Varuna"]


class Varuna(nn.Module):
    """Trains a model that computes its loss, cut at some of its ``CutPoint``s, as ``stage_to_rank_map`` says.

    The third argument says how the model is called: a dict of keyword arguments (``dry_run_input``), or a function
    ``get_batch_fn(size, device)`` that returns one. ``batch_size`` is that of a mini-batch over all replicas,
    ``chunk_size`` that of a micro-batch. This module's parameters are those of this rank's stage, under the model's
    names.
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
        self._cuts = checkpoint.Cuts.of(plan)
        replicas = zip(*self.stage_to_rank_map.values(), strict=True)
        group = [rank for replica in replicas for rank in replica]
        mesh = ps.Mesh(data=self.data_depth, pipe=self.partitions, group=group, device=own_device)
        self.device = mesh.device
        self.pipeline = ps.Pipeline(
            plan,
            _find_loss,
            microbatches=-(-self.batch_size // chunk),
            microbatch_size=chunk,
            mesh=mesh,
            recompute=dict.fromkeys(range(self.partitions - 1), "always"),
            outputs=None,
        )
        self.partitioned_model = self.pipeline.stage_modules[self.stage]
        self.optimizer: Optimizer | None = None
        self._scaler: ps.GradScaler | None = None
        self._constant_scale = False
        # The scaler unscales all gradients of this rank, whatever parameters the program's optimizer has.
        own = list(self.pipeline.parameters())
        self._all_parameters = SGD(own, lr=0.0) if own else None
        self._copy_thread = ThreadPoolExecutor(1, thread_name_prefix="penstock checkpoint")
        self._copying: Future[None] | None = None
        self._loaded: checkpoint.LoadedCheckpoint | None = None  # for an optimizer that is set later

    # ── training ─────────────────────────────────────────────────────────────────────────────────────────────

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
        self._resume()

    def step(self, inputs: Mapping[str, Any], clip_grad_max_norm: float | None = None) -> tuple[float, bool, float]:
        """Forward and backward of a mini-batch; return the loss, whether gradients overflowed, and their norm.

        The results are the same on all ranks. ``inputs`` are this replica's part of the mini-batch, the same on all of
        its ranks; a tensor of one sample goes to every micro-batch. Gradients are accumulated; where they overflow they
        are dropped, and the norm is nan.
        """
        value = _arguments(inputs)
        loss, overflow = self._step_fp16(value) if self.fp16 else (self.pipeline.step(value).loss, False)
        if overflow:
            norm = math.nan
        elif clip_grad_max_norm is None:
            norm = float(self.pipeline.grad_norm())
        else:
            norm = float(self.pipeline.clip_grad_norm_(clip_grad_max_norm))
        self.iteration += 1
        return float(loss), overflow, norm

    def _step_fp16(self, value: Any) -> tuple[Tensor, bool]:
        """A step under autocast, and whether its gradients are not finite: then only the earlier ones are kept."""
        if self._scaler is None:
            raise ps.PlanError("with fp16=True the loss is scaled: call set_optimizer(optimizer) before step")
        before = [(parameter, parameter.grad) for parameter in self.pipeline.parameters()]
        self.pipeline.zero_grad()
        overflow = True
        try:
            with torch.autocast(self.device.type, torch.float16):
                loss: Tensor = self.pipeline.step(value).loss
            self._scaler.unscale_(self._all_parameters)
            overflow = self._scaler.update()
        finally:
            for parameter, grad in before:
                if grad is not None and parameter.grad is not None and not overflow:
                    grad.add_(parameter.grad)
                if grad is not None or overflow:
                    parameter.grad = grad
        return loss, overflow

    def evaluate(self, inputs: Mapping[str, Any], batch_size: int | None = None) -> float:
        """The loss of a mini-batch of any size, without gradients; the same on all ranks."""
        with torch.autocast(self.device.type, torch.float16, enabled=self.fp16):
            return float(self.pipeline.evaluate(_arguments(inputs)).loss)

    def get_loss_scale(self) -> float:
        """The loss scale; 1.0 without ``fp16``."""
        return 1.0 if self._scaler is None else self._scaler.get_scale()

    def forward(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("Varuna has no forward alone: call step(inputs) to train, evaluate(inputs) to evaluate")

    # ── checkpoints ──────────────────────────────────────────────────────────────────────────────────────────

    def checkpoint(
        self, global_store: str | Path, step: int | None = None, tempdir: str | Path | None = None, shard: bool = False
    ) -> Future[None] | None:
        """Write ``varuna_ckpt_<step>`` to ``global_store``, a folder that all ranks share: one file per cut.

        Every rank calls it. With ``tempdir`` the files are written in the background, from copies in host memory; the
        future is done when this rank's are. With ``shard`` every replica writes a part.
        """
        step = self.iteration if step is None else step
        if self._copying is not None:
            wait([self._copying])  # it may be of the same step
        folder = checkpoint.folder_of(global_store, step)
        first = self.stage == 0 and self.rank_within_stage == 0
        self._on_all_ranks(lambda: checkpoint.begin(folder) if first else None, f"begin {folder}")
        part, parts = (self.rank_within_stage, self.data_depth) if shard else (0, 1)
        writers = [ranks[d] for ranks in self.stage_to_rank_map.values() for d in range(parts)]
        files: dict[str, Any] = {}
        if self.rank in writers:
            layers, state = self.pipeline.plan.groups[self.stage], self.pipeline.state_dict()
            states = checkpoint.optimizer_states(self.optimizer, self._saved_names())
            files = self._cuts.contents(layers, state, states, part, parts)
        if first:
            files[checkpoint.COMMON] = {
                "step": step,
                "cuts": len(self._cuts.layers),
                "writers": writers,
                "shards": parts,
                "groups": checkpoint.optimizer_options(self.optimizer),
                "scaler": {} if self._scaler is None else self._scaler.state_dict(),
            }
        if tempdir is None:
            self._on_all_ranks(lambda: checkpoint.write(folder, files, self.rank), f"write {folder}")
            return None
        # The files are written from copies, while training changes the parameters.
        self._copying = self._copy_thread.submit(checkpoint.write, folder, copy.deepcopy(files), self.rank)
        return self._copying

    def load_checkpoint(self, global_store: str | Path, iteration: int, check_complete: bool = True) -> None:
        """Resume from a checkpoint of any depth: parameters, buffers, optimizer state and loss scale.

        Every rank calls it. An optimizer that is set later gets its state then.
        """
        folder = checkpoint.folder_of(global_store, iteration)
        names = list(self.pipeline.state_dict())
        loaded: list[checkpoint.LoadedCheckpoint] = []
        read = lambda: loaded.append(checkpoint.read(folder, self._cuts, names, check_complete))  # noqa: E731
        self._on_all_ranks(read, f"read {folder}")
        (self._loaded,) = loaded
        self.pipeline.load_state_dict(self._loaded.state)
        self._loaded.state.clear()
        self.iteration = iteration
        if self.optimizer is not None:
            self._resume()

    def _resume(self) -> None:
        """Load a checkpoint's optimizer state and loss scale, once."""
        loaded, self._loaded = self._loaded, None
        if loaded is None or self.optimizer is None:
            return
        loaded.restore(self.optimizer, self._saved_names())
        if self._scaler is not None and loaded.scaler and not self._constant_scale:
            self._scaler.load_state_dict(loaded.scaler)

    def _saved_names(self) -> dict[int, str]:
        """The names under which this rank's parameters are saved, by id."""
        saved_as = self._cuts.saved_as
        return {id(p): saved_as[name] for name, p in self.pipeline.named_parameters() if name in saved_as}

    def _on_all_ranks(self, work: Callable[[], None], purpose: str) -> None:
        """Run ``work``; where it fails on any rank, raise an error on all."""
        failure: Exception | None = None
        try:
            work()
        except Exception as error:
            failure = error
        if self.pipeline.max_over_ranks(float(failure is not None)):
            raise failure or ps.PipelineError(f"another rank could not {purpose}: see its error")

    # ── as a module ──────────────────────────────────────────────────────────────────────────────────────────

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank's stage, under the model's names."""
        for name, parameter in self.pipeline.named_parameters():
            yield f"{prefix}.{name}" if prefix else name, parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The buffers of this rank's stage, under the model's names."""
        yield from self.partitioned_model.named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The parameters and buffers of this rank's stage, under the model's names."""
        if args or kwargs:
            raise ps.PlanError("state_dict() of a Varuna model takes no arguments: it is no part of another module")
        return dict(self.pipeline.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> None:
        """Load this rank's part of the state of the whole model, or of this stage."""
        if assign:
            raise ps.PlanError("assign=True would replace the parameters that the optimizer updates: leave it out")
        self.pipeline.load_state_dict(state_dict, strict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.pipeline.zero_grad(set_to_none)

    def train(self, mode: bool = True) -> Varuna:
        super().train(mode)
        self.pipeline.train(mode)
        return self


def _arguments(inputs: Any) -> dict[str, Any]:
    """The model's keyword arguments; tensors of one sample among larger ones go to every micro-batch."""
    if not isinstance(inputs, Mapping):
        raise ps.PlanError(f"inputs must be a dict of the model's keyword arguments, got {type(inputs).__name__}")
    leaves, spec = hooks.tree_flatten(dict(inputs))
    sizes = {i: leaf.shape[0] for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.dim()}
    if any(size != 1 for size in sizes.values()):
        leaves = [ps.Broadcast(leaf) if sizes.get(i) == 1 else leaf for i, leaf in enumerate(leaves)]
    arguments: dict[str, Any] = hooks.tree_unflatten(leaves, spec)
    return arguments


def _find_loss(output: Any) -> Any:
    """The loss in the model's output: the first item of a tuple, the entry or attribute ``loss``, or the output."""
    if isinstance(output, (tuple, list)) and output:
        return output[0]
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
