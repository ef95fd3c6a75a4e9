"""What surrounds the steps of a model: its loss, its outputs, and the update of its parameters.

A call has ``deviceIterations × gradientAccumulation`` turns; in each, every replica has one micro-batch:

    turn       0     1     2     3        samples of a call, in order: turn by turn, replica by replica
    replica    0 1   0 1   0 1   0 1
    Final                        ▪ ▪
    EveryN(2)        ▪ ▪         ▪ ▪
    All        ▪ ▪   ▪ ▪   ▪ ▪   ▪ ▪
    Sum        the sum of each replica's outputs
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

import penstock as ps
from penstock import hooks
from penstock.compat.poptorch.enums import OutputMode
from penstock.compat.poptorch.errors import Error, require
from penstock.compat.poptorch.options import Options

__all__ = ["OutputCollector", "Updater", "find_loss", "identity_loss", "recomputationCheckpoint"]


# ── the loss ─────────────────────────────────────────────────────────────────────────────────────────────────────

_MARK = "_poptorch_loss"
_REDUCTIONS = {0: "sum", 1: "mean", 2: "none"}


def identity_loss(x: Tensor, reduction: str | int) -> Tensor:
    """``x`` reduced by ``"sum"``, ``"mean"`` or ``"none"``, marked as the loss to train by."""
    if has_torch_function_unary(x):  # a trace records the call, so that the mark is set when the model runs
        function: Any = identity_loss
        traced: Tensor = handle_torch_function(function, (x,), x, reduction)
        return traced
    name = _REDUCTIONS.get(reduction, "") if isinstance(reduction, int) else reduction
    require(name in _REDUCTIONS.values(), f"Unsupported reduction type! 'sum', 'mean' or 'none', not {reduction!r}")
    loss = x.sum() if name == "sum" else x.mean() if name == "mean" else x.view_as(x)
    setattr(loss, _MARK, True)
    return loss


def find_loss(output: Any) -> Tensor:
    """The loss in a model's output: the tensor that ``identity_loss`` marked, or the only scalar with a gradient."""
    tensors = [leaf for leaf in hooks.tree_flatten(output)[0] if isinstance(leaf, Tensor)]
    trainable = [leaf for leaf in tensors if leaf.requires_grad]
    found = [leaf for leaf in tensors if hasattr(leaf, _MARK)]
    found = (
        found or [leaf for leaf in trainable if leaf.dim() == 0] or [leaf for leaf in trainable if leaf.numel() == 1]
    )
    if not found:
        raise Error(
            "Couldn't find a loss in graph: a training model's forward must return its loss, one number that depends "
            "on the parameters. Return it beside the outputs, or mark it with poptorch.identity_loss"
        )
    if len({id(leaf) for leaf in found}) > 1:
        raise Error(
            f"Multiple independent losses found in graph: {len(found)} of the outputs could be the loss. Mark the one "
            "to train by with poptorch.identity_loss(loss, reduction='none')"
        )
    return found[0] if found[0].numel() == 1 else found[0].sum()


def recomputationCheckpoint(*tensors: Tensor) -> Any:
    """Save these values instead of recomputing them, where the forward is recomputed (``penstock.keep``)."""
    kept = [ps.keep(tensor) for tensor in tensors]
    return kept[0] if len(kept) == 1 else tuple(kept)


# ── outputs ──────────────────────────────────────────────────────────────────────────────────────────────────────


class OutputCollector:
    """Takes the outputs of a call's micro-batches in order. As a pipeline's ``outputs`` it is called with each."""

    def __init__(self, options: Options, *, training: bool) -> None:
        mode = options.output_mode
        if mode == OutputMode.Default:
            mode = OutputMode.Final if training else OutputMode.All
        self.sums = mode == OutputMode.Sum
        self.replicas: int = options.replication_factor
        turns = options.device_iterations * options.Training.gradient_accumulation
        self.period = {OutputMode.Final: turns, OutputMode.EveryN: options.output_return_period}.get(mode, 1)
        if self.period > turns:
            raise Error(
                f"OutputMode.EveryN returns the output of every {self.period}th micro-batch, but a call has "
                f"{turns}: choose an output_return_period of at most that"
            )
        self.reset()

    def reset(self) -> None:
        self.count = 0
        self.spec: Any = None
        self.rows: list[list[Any]] = []  # the leaves of each output that is kept

    def __call__(self, so_far: None, output: Any) -> None:
        turn, replica = divmod(self.count, self.replicas)
        self.count += 1
        if (turn + 1) % self.period:
            return
        leaves, spec = hooks.tree_flatten(output)
        if self.rows and spec != self.spec:
            raise Error("the model returned outputs of another structure than before: they cannot be joined")
        self.spec = spec
        if self.sums and turn:
            pairs = zip(self.rows[replica], leaves, strict=True)
            self.rows[replica] = [before + new if isinstance(new, Tensor) else new for before, new in pairs]
        else:
            self.rows.append(leaves)

    def result(self) -> Any:
        """The outputs that the call returns, on the host."""
        leaves = []
        for column in zip(*self.rows, strict=True):
            leaf = column[-1]
            if isinstance(leaf, Tensor):  # scalars become a vector, unless there is just one
                if leaf.dim():
                    leaf = torch.cat(list(column))
                else:
                    leaf = torch.stack(list(column)) if len(column) > 1 else leaf.clone()
                leaf = leaf.cpu()
                leaf.backward = _refuse_backward  # type: ignore[method-assign]
            leaves.append(leaf)
        result = hooks.tree_unflatten(leaves, self.spec)
        self.reset()
        return result


def _refuse_backward(*args: Any, **kwargs: Any) -> None:
    raise Error(
        "backward() cannot be called explicitly on outputs of a PopTorch model. If you're using a trainingModel, the "
        "backwards pass is performed automatically when invoking the model. If you're using an inferenceModel, you "
        "should use a trainingModel instead."
    )


# ── updates ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Updater:
    """Applies an optimizer to a pipeline's gradients: loss scale, clipping, the step, state in host memory."""

    def __init__(self, options: Options, optimizer: Any) -> None:
        self.weights_off_chip: bool = options.TensorLocations.off_chip("weight")
        self.off_chip: bool = self.weights_off_chip or options.TensorLocations.off_chip("optimizer")
        self.automatic: bool = options.Training.automatic_loss_scaling
        self.optimizer: Any = None
        self._constants: dict[str, Any] = {}
        self._pipeline: ps.Pipeline | None = None
        self._scaler: ps.GradScaler | None = None
        self.use(optimizer)

    def use(self, optimizer: Any) -> None:
        """Continue with ``optimizer``. A new one of the same class takes over the state of the previous one."""
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise Error(f"an optimizer is a poptorch.optim or torch.optim one, got {type(optimizer).__name__}")
        attributes = getattr(optimizer, "variable_attrs", None)
        constants = {} if attributes is None else attributes.constants(optimizer)
        for name in self._constants.keys() & constants.keys():
            before, new = self._constants[name], constants[name]
            if before != new:
                raise Error(f"{name} was marked as constant: it is {before}, and cannot become {new}")
        self._constants = constants
        previous = self.optimizer
        if previous is optimizer:
            return
        if type(previous) is type(optimizer) and not optimizer.state:
            own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            optimizer.state.update((p, state) for p, state in previous.state.items() if id(p) in own)
        self.optimizer = optimizer
        if self._pipeline is not None:
            self.attach(self._pipeline)

    def attach(self, pipeline: ps.Pipeline) -> None:
        """Work on the gradients of this pipeline."""
        self._pipeline = pipeline
        if self._scaler is None and self.automatic:
            self._scaler = ps.GradScaler(pipeline)
        if hooks.is_offloaded(self.optimizer):
            if self.weights_off_chip:
                raise Error("this optimizer brings the weights of another model to its devices: make a new one")
            return
        for parameter, state in self.optimizer.state.items():  # created or loaded on another device
            if isinstance(parameter, nn.Parameter):
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.dim():
                        state[name] = value.to(parameter.device)
        if self.off_chip:
            _offload(pipeline, self.optimizer)

    def prepare(self) -> None:
        """Set the loss scale before a step."""
        assert self._pipeline is not None
        if self._scaler is None and self._pipeline.loss_scale != self._scale:
            self._pipeline.loss_scale = self._scale

    def apply(self) -> None:
        """Update the parameters after a step, and clear the gradients."""
        pipeline, max_norm = self._pipeline, getattr(self.optimizer, "max_grad_norm", None)
        assert pipeline is not None
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        elif self._scale != 1.0:
            for parameter in pipeline.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(self._scale)
        if max_norm is not None:
            pipeline.clip_grad_norm_(max_norm)
        if self._scaler is None:
            self.optimizer.step()
        else:
            self._scaler.step(self.optimizer)
            self._scaler.update()
        pipeline.align_ties()
        pipeline.zero_grad()

    @property
    def accumulates_fp32(self) -> bool:
        """Whether half-precision gradients are to be accumulated in single precision."""
        parameters = (p for group in self.optimizer.param_groups for p in group["params"])
        wide = getattr(self.optimizer, "accum_type", None) is torch.float32
        return wide and any(parameter.dtype.itemsize < 4 for parameter in parameters)

    @property
    def _scale(self) -> float:
        return float(getattr(self.optimizer, "loss_scaling", 1.0))


def _offload(pipeline: ps.Pipeline, optimizer: Any) -> None:
    """Keep the state in host memory. An LR scheduler that was created before has wrapped ``step``: wrap it again."""
    wrapped = vars(optimizer).pop("step", None)
    pipeline.offload_optimizer(optimizer)
    if wrapped is not None and hasattr(wrapped, "_wrapped_by_lr_sched"):
        offloaded_step = optimizer.step

        def step(*args: Any, **kwargs: Any) -> Any:
            optimizer._opt_called = True
            return offloaded_step(*args, **kwargs)

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = step
