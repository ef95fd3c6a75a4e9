"""``trainingModel`` and ``inferenceModel``: a PyTorch model with PopTorch's interface, run by a pipeline.

A call has ``deviceIterations × gradientAccumulation`` turns; in each, every replica has one micro-batch:

    turn       0     1     2     3        samples of a call, in order: turn by turn, replica by replica
    replica    0 1   0 1   0 1   0 1
    Final                        ▪ ▪
    EveryN(2)        ▪ ▪         ▪ ▪
    All        ▪ ▪   ▪ ▪   ▪ ▪   ▪ ▪
    Sum        the sum of each replica's outputs
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

import penstock as ps
from penstock import hooks
from penstock._torch import profile_all_threads
from penstock.compat.poptorch import optim
from penstock.compat.poptorch.blocks import device_of_ipu, plan_stages
from penstock.compat.poptorch.enums import Error, OutputMode, ReductionType, require
from penstock.compat.poptorch.options import Options

__all__ = ["PoplarExecutor", "identity_loss", "inferenceModel", "load", "recomputationCheckpoint", "trainingModel"]

_IPU_ONLY = ("cycleCount", "getHostIpuLatency", "getIpuHostLatency", "getPerfCounters", "loadExecutable", "rng_state")


def trainingModel(
    model: nn.Module, options: Options | None = None, optimizer: torch.optim.Optimizer | None = None
) -> PoplarExecutor:
    """Wrap a model for training: a call is forward, backward and update, ``deviceIterations`` times.

    The model's forward computes the loss. The default optimizer is ``SGD(lr=0.01)``. The model and its wrapper share
    parameters. The wrapper keeps the present train or eval mode of the modules.
    """
    return PoplarExecutor(model, options, training=True, optimizer=optimizer)


def inferenceModel(model: nn.Module, options: Options | None = None) -> PoplarExecutor:
    """Wrap a model for inference: a call is the forward of ``deviceIterations`` micro-batches."""
    return PoplarExecutor(model, options, training=False)


def load(filename: str, edit_opts_fn: Callable[[Options], Any] | None = None) -> PoplarExecutor:
    """Load a model that ``save`` wrote; ``edit_opts_fn`` may change its options.

    The file contains pickled Python objects: load only files that you trust.
    """
    content = torch.load(filename, map_location="cpu", weights_only=False)
    if not isinstance(content, dict) or content.keys() != {"model", "options", "training", "optimizer", "modes"}:
        raise Error(f"{filename} was not written by a model's save()")
    if edit_opts_fn is not None:
        edit_opts_fn(content["options"])
    executor = PoplarExecutor(content["model"], content["options"], content["training"], content["optimizer"])
    executor._modes = content["modes"]
    return executor


class PoplarExecutor:
    """A model that runs on a pipeline. It forwards other attributes to the model."""

    def __init__(self, model: nn.Module, options: Options | None, training: bool, optimizer: Any = None) -> None:
        if isinstance(model, PoplarExecutor):
            kind = "trainingModel" if model._training else "inferenceModel"
            unwrap = "Call model.destroy() on the model to unwrap before wrapping again."
            raise Error(f"model has already been wrapped in 'poptorch.{kind}'. {unwrap}")
        if not isinstance(options, Options | None):
            raise Error("Invalid type: 'options' must be of type poptorch.Options")
        self.options = options or Options()
        self.options._freeze()
        self._training: bool = training
        if not training and self.options.Training.gradient_accumulation != 1:
            raise Error("Gradient accumulation must be left to its default value (1) for inference: clone the options")
        mode = self.options.output_mode
        if mode == OutputMode.Default:
            mode = OutputMode.Final if training else OutputMode.All
        turns = self.options.device_iterations * self.options.Training.gradient_accumulation
        self._sums = mode == OutputMode.Sum
        self._period = {OutputMode.Final: turns, OutputMode.EveryN: self.options.output_return_period}.get(mode, 1)
        if self._period > turns:
            raise Error(f"EveryN is every {self._period}th micro-batch, but a call has {turns}: shorten the period")
        self._outputs: list[Any] = []  # of the micro-batches of this call; None if not returned
        self.model = model
        self._modes: dict[str, bool] = {path: module.training for path, module in model.named_modules()}
        self._pipe: ps.Pipeline | None = None
        self._scaler: ps.GradScaler | None = None
        self._attached = self._destroyed = False
        self._seconds: list[float] = []
        self._optimizer: Any = None
        if training:
            self.setOptimizer(optimizer or optim.SGD(model.parameters(), lr=0.01))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on ``micro-batch × gradientAccumulation × deviceIterations × replicationFactor`` samples."""
        first = self._pipe is None
        self.compile(*args, **kwargs)
        assert self._pipe is not None
        self._outputs.clear()
        profile: Any = nullcontext()
        if first and self.options.profile_dir is not None:
            path = Path(self.options.profile_dir) / ("training.json" if self._training else "inference.json")
            path.parent.mkdir(parents=True, exist_ok=True)
            write = partial(torch.profiler.profile.export_chrome_trace, path=str(path))
            profile = torch.profiler.profile(experimental_config=profile_all_threads(), on_trace_ready=write)
        with self._module_modes(), profile:
            self._run(self._pipe, hooks.Arguments(args, kwargs))
        kept = [output for output in self._outputs if output is not None]
        self._outputs.clear()
        (rows, specs), replicas = zip(*kept, strict=True), self.options.replication_factor
        if any(spec != specs[0] for spec in specs):
            raise Error("the model returned outputs of different structures: they cannot be joined")
        leaves: list[Any] = []
        for column in zip(*rows, strict=True):
            leaf = column[-1]
            if isinstance(leaf, Tensor):
                parts = [sum(column[r::replicas]) for r in range(replicas)] if self._sums else list(column)
                if leaf.dim():
                    leaf = torch.cat(parts)
                else:  # scalars become a vector, unless there is just one
                    leaf = torch.stack(parts) if len(parts) > 1 else parts[0].clone()
                leaf = leaf.cpu()
                leaf.backward = _refuse_backward
            leaves.append(leaf)
        return hooks.tree_unflatten(leaves, specs[0])

    def _run(self, pipe: ps.Pipeline, inputs: Any) -> None:
        if not self._training:
            self._seconds = [pipe.evaluate(inputs, outputs=self._collect).seconds]
            return
        iterations: int = self.options.device_iterations
        leaves, spec = hooks.tree_flatten(inputs)
        self._seconds = []
        pipe.zero_grad()
        for k in range(iterations):
            part = [leaf.chunk(iterations)[k] if isinstance(leaf, Tensor) and leaf.dim() else leaf for leaf in leaves]
            if self._scaler is None:
                pipe.loss_scale = float(getattr(self._optimizer, "loss_scaling", 1.0))
            self._seconds.append(pipe.step(hooks.tree_unflatten(part, spec)).seconds)
            if self._scaler is not None:
                self._scaler.unscale_(self._optimizer)
            elif pipe.loss_scale != 1.0:
                for parameter in pipe.parameters():
                    if parameter.grad is not None:
                        parameter.grad.div_(pipe.loss_scale)
            if getattr(self._optimizer, "max_grad_norm", None) is not None:
                pipe.clip_grad_norm_(self._optimizer.max_grad_norm)
            if self._scaler is None:
                self._optimizer.step()
            else:
                self._scaler.step(self._optimizer)
                self._scaler.update()
            pipe.align_ties()
            pipe.zero_grad()

    def _collect(self, so_far: None, output: Any) -> None:
        turn = len(self._outputs) // self.options.replication_factor
        self._outputs.append(None if (turn + 1) % self._period else hooks.tree_flatten(output))

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Build the pipeline for calls like this one, without running it."""
        if self._destroyed:
            raise Error("this model was destroyed: wrap it again")
        options = self.options
        counts = options.device_iterations, options.replication_factor, options.Training.gradient_accumulation
        parts = counts[0] * counts[1] * counts[2]
        leaves = [leaf for leaf in hooks.tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        if not leaves:
            raise Error("a call takes tensors with samples along their first dimension: there are none")
        for leaf in [leaf for leaf in leaves if leaf.dim()] or leaves:  # 0-dim tensors go to every micro-batch
            samples = len(leaf) if leaf.dim() else 1
            require(
                samples % parts == 0 and samples,
                f"Invalid batch dimension: In the input {leaf.shape}, the batch dimension ({samples}) must be a "
                f"multiple of Options.deviceIterations({counts[0]}) * Options.replicationFactor({counts[1]}) * "
                f"Options.Training.gradientAccumulation({counts[2]}) = {parts} because it is used to calculate the "
                "batch size which will be executed on the device in any given iteration.",
            )
        if self._pipe is None:
            with self._module_modes():
                self._pipe = self._build(args, kwargs)
        self.copyWeightsToDevice()  # another wrapper of the same modules may have moved them

    def _build(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ps.Pipeline:
        options, strategy = self.options, self.options.execution_strategy
        plan, ipus = plan_stages(self.model, strategy, (args, kwargs))
        turns = options.Training.gradient_accumulation if self._training else options.device_iterations
        needed = 2 * plan.num_stages - 1 if self._training else plan.num_stages
        if plan.num_stages > 1 and turns < needed and strategy.schedule == "1f1b":
            kind = "gradient accumulation factor" if self._training else "device iterations"
            warnings.warn(
                f"For pipelining, depth ({kind}) must equal at least the number of pipeline stages ({needed}) on IPUs. "
                f"Here {turns} works, but stages are idle",
                stacklevel=4,
            )
        off_chip = {"weights": options._off_chip("weight")}
        if self._training:
            off_chip |= {"activations": options._off_chip("activation"), "optimizer": options._off_chip("optimizer")}
        wide = getattr(self._optimizer, "accum_type", None) is torch.float32
        half = any(parameter.dtype.itemsize < 4 for parameter in self.model.parameters())
        mean = options.Training.accumulation_and_replication_reduction_type == ReductionType.Mean
        pipe = ps.Pipeline(
            plan,
            find_loss if self._training else lambda output, target: None,  # without targets it is not called
            microbatches=turns * options.replication_factor,
            schedule=strategy.schedule,
            devices=[device_of_ipu(ipu) for ipu in ipus],
            reduction="mean" if mean else "sum",
            outputs=self._collect,
            seed=options.random_seed,
            recompute="always" if options._Popart.toDict().get("autoRecomputation") else "never",
            accumulate="fp32" if wide and half else None,
            offload=ps.Offload(**off_chip) if any(off_chip.values()) else None,
        )
        if self._training:
            self._attach_optimizer(pipe)
        return pipe

    def isCompiled(self) -> bool:
        return self._pipe is not None

    def setOptimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Continue with another optimizer or other settings. An optimizer of the same class takes over the state."""
        if not self._training:
            raise Error("setOptimizer needs a model made by poptorch.trainingModel")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise Error(f"an optimizer is a poptorch.optim or torch.optim one, got {type(optimizer).__name__}")
        previous, self._optimizer = self._optimizer, optimizer
        if previous is optimizer:
            return
        if type(previous) is type(optimizer) and not optimizer.state:
            own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            optimizer.state.update((p, state) for p, state in previous.state.items() if id(p) in own)
        if self._pipe is not None:
            self._attach_optimizer(self._pipe)

    def _attach_optimizer(self, pipe: ps.Pipeline) -> None:
        """Set up loss scaling, and offload the optimizer's state if the options select it."""
        optimizer, off_chip = self._optimizer, [self.options._off_chip(kind) for kind in ("weight", "optimizer")]
        if self._scaler is None and self.options.Training.automatic_loss_scaling:
            self._scaler = ps.GradScaler(pipe)
        if hooks.is_offloaded(optimizer):
            if off_chip[0]:
                raise Error("this optimizer offloads the weights of another model: create a new one")
            return
        for parameter, state in optimizer.state.items():  # created or loaded on another device
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim():
                    state[name] = value.to(parameter.device)
        if any(off_chip):
            wrapped = vars(optimizer).pop("step", None)  # of an earlier LR scheduler
            pipe.offload_optimizer(optimizer)
            if wrapped is not None:
                optimizer.step.__func__._wrapped_by_lr_sched = optimizer._opt_called = True

    def _module_modes(self) -> AbstractContextManager[None]:
        """A context in which the modules are in the train or eval modes of this executor."""
        return hooks.with_training_modes([(self.model.get_submodule(path), mode) for path, mode in self._modes.items()])

    def train(self, mode: bool = True) -> Self:
        """Run in training mode from now on. The mode of the model is not changed."""
        self._modes = dict.fromkeys(self._modes, mode)
        return self

    def eval(self) -> Self:
        """Run in evaluation mode from now on."""
        return self.train(False)

    @property
    def training(self) -> bool:
        return self._modes[""]

    def copyWeightsToHost(self) -> None:
        """Move parameters and buffers to the CPU, where the model itself can run."""
        self._move("cpu")

    def copyWeightsToDevice(self) -> None:
        """Move parameters and buffers to the devices. Calls do it if needed."""
        self._move(None)

    copyNamedBuffersToDevice = copyWeightsToDevice

    def _move(self, device: str | None) -> None:
        if self._pipe is not None and not self._destroyed:
            self._pipe.move(device)
            self._attached = device is None

    def state_dict(self) -> dict[str, Tensor]:
        """The model's state, on the CPU."""
        self.copyWeightsToHost()
        return self.model.state_dict()

    def attachToDevice(self) -> None:
        if self._pipe is None:
            raise Error("attachToDevice is for a compiled model: call it, or compile(…), first")
        self.copyWeightsToDevice()

    def detachFromDevice(self) -> None:
        """Move the weights to the CPU until the next call."""
        if not self.isAttachedToDevice():
            raise Error("the model is not attached to a device")
        self.copyWeightsToHost()

    def isAttachedToDevice(self) -> bool:
        return self._attached

    def destroy(self) -> None:
        """Close the pipeline. The weights are on the CPU; the model can be used and wrapped again."""
        self.copyWeightsToHost()
        if self._pipe is not None:
            self._pipe.close()
        self._destroyed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.destroy()

    def save(self, filename: str) -> None:
        """Write the model, its options and its optimizer to a file, for ``poptorch.load``."""
        self.copyWeightsToHost()
        content = {"model": self.model, "options": self.options, "training": self._training, "modes": self._modes}
        torch.save({**content, "optimizer": self._optimizer}, filename)

    def compileAndExport(self, filename: str, *args: Any, **kwargs: Any) -> None:
        self.compile(*args, **kwargs)
        self.save(filename)

    def getLatency(self) -> tuple[float, float, float]:
        """The minimum, maximum and mean seconds of an iteration of the last call."""
        if not self._seconds:
            raise Error("getLatency needs a previous call")
        return min(self._seconds), max(self._seconds), sum(self._seconds) / len(self._seconds)

    getComputeLatency = getLatency

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in _IPU_ONLY:
            raise Error(f"{name} needs an IPU, and there is none")
        return getattr(self.model, name)


# ── the loss ─────────────────────────────────────────────────────────────────────────────────────────────────────

_MARK = "_poptorch_loss"
_REDUCTIONS: dict[str | int, str | int] = {0: "sum", 1: "mean", 2: "none"}


def identity_loss(x: Tensor, reduction: str | int) -> Tensor:
    """``x`` reduced by ``"sum"``, ``"mean"`` or ``"none"``, marked as the loss to train by."""
    if has_torch_function_unary(x):  # a trace records this call, which sets the mark when the model runs
        return handle_torch_function(identity_loss, (x,), x, reduction)
    name = _REDUCTIONS.get(reduction, reduction)
    require(name in _REDUCTIONS.values(), f"Unsupported reduction type! 'sum', 'mean' or 'none', not {reduction!r}")
    loss = x.sum() if name == "sum" else x.mean() if name == "mean" else x.view_as(x)
    setattr(loss, _MARK, True)
    return loss


def find_loss(output: Any) -> Tensor:
    """The loss in a model's output: the tensor that ``identity_loss`` marked, or the only scalar with a gradient."""
    tensors = [leaf for leaf in hooks.tree_flatten(output)[0] if isinstance(leaf, Tensor)]
    marked = [leaf for leaf in tensors if hasattr(leaf, _MARK)]
    marked = [leaf for leaf in marked if not any(_depends(other, leaf) for other in marked)]
    found = marked or [leaf for leaf in tensors if leaf.requires_grad and leaf.dim() == 0]
    if not found:
        raise Error(
            "Couldn't find a loss in graph: return one number that depends on the parameters from the forward, beside "
            "its outputs, or mark the loss with poptorch.identity_loss"
        )
    if len({id(leaf) for leaf in found}) > 1:
        mark = "mark the one to train by with poptorch.identity_loss(loss, reduction='none')"
        raise Error(f"Multiple independent losses found in graph: {len(found)} outputs could be the loss, {mark}")
    return found[0] if found[0].numel() == 1 else found[0].sum()


def _depends(loss: Tensor, other: Tensor) -> bool:
    """Whether a loss was computed from another one, as in nested calls of ``identity_loss``."""
    graph = loss is not other and loss.requires_grad and other.requires_grad
    return graph and torch.autograd.grad(loss.sum(), other, retain_graph=True, allow_unused=True)[0] is not None


def recomputationCheckpoint(*tensors: Tensor) -> Any:
    """Save these values instead of recomputing them, if the forward is recomputed (``penstock.keep``)."""
    kept = [ps.keep(tensor) for tensor in tensors]
    return kept[0] if len(kept) == 1 else tuple(kept)


def _refuse_backward(*args: Any, **kwargs: Any) -> None:
    remedy = "a trainingModel has run the backward when its call returns"
    raise Error(f"backward() cannot be called explicitly on outputs of a PopTorch model: {remedy}")
