"""``trainingModel`` and ``inferenceModel``: a PyTorch model, called as PopTorch's are, run by a pipeline."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

import penstock as ps
from penstock import hooks
from penstock._torch import profile_all_threads
from penstock.compat.poptorch import optim
from penstock.compat.poptorch.blocks import device_of_ipu, plan_stages
from penstock.compat.poptorch.enums import ReductionType
from penstock.compat.poptorch.errors import Error, require
from penstock.compat.poptorch.options import Options
from penstock.compat.poptorch.training import OutputCollector, Updater, find_loss

__all__ = ["PoplarExecutor", "inferenceModel", "load", "trainingModel"]

logger = logging.getLogger("penstock.compat.poptorch")

_FORMAT = "penstock.compat.poptorch 1"
_IPU_ONLY = ("cycleCount", "getHostIpuLatency", "getIpuHostLatency", "getPerfCounters", "loadExecutable", "rng_state")


def trainingModel(
    model: nn.Module, options: Options | None = None, optimizer: torch.optim.Optimizer | None = None
) -> PoplarExecutor:
    """Wrap a model for training: a call is forward, backward and update, ``deviceIterations`` times.

    The model's forward computes the loss. The default optimizer is ``SGD(lr=0.01)``. Parameters are shared with the
    model; the train or eval mode of its modules is the present one.
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
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise Error(f"{filename} was not written by a model's save()")
    options = content["options"].clone()
    if edit_opts_fn is not None:
        edit_opts_fn(options)
    executor = PoplarExecutor(content["model"], options, content["training"], content["optimizer"])
    executor._modes = content["modes"]
    return executor


class PoplarExecutor:
    """A model that runs on a pipeline. Other attributes are the model's."""

    def __init__(
        self,
        model: nn.Module,
        options: Options | None,
        training: bool,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        if isinstance(model, PoplarExecutor):
            raise Error(
                f"model has already been wrapped in 'poptorch.{model._kind}'. Call model.destroy() on the model to "
                "unwrap before wrapping again."
            )
        if not isinstance(model, nn.Module):
            raise Error(f"a model is a torch.nn.Module, got {type(model).__name__}")
        if not isinstance(options, Options | None):
            raise Error("Invalid type: 'options' must be of type poptorch.Options")
        if options is not None:
            options._freeze()
        self._options = Options() if options is None else options.clone()
        self._options._freeze()
        self._training = training
        self._kind: str = "trainingModel" if training else "inferenceModel"
        if not training and self._options.Training.gradient_accumulation != 1:
            raise Error(
                "Gradient accumulation must be left to its default value (1) for inference: "
                "options.clone().Training.gradientAccumulation(1)"
            )
        self._outputs = OutputCollector(self._options, training=training)
        self._model = model
        self._modes: dict[str, bool] = {path: module.training for path, module in model.named_modules()}
        self._pipe: ps.Pipeline | None = None
        self._updater: Updater | None = None
        self._attached = self._destroyed = False
        self._seconds: list[float] = []
        if training:
            self._updater = Updater(self._options, optimizer or optim.SGD(model.parameters(), lr=0.01))

    @property
    def model(self) -> nn.Module:
        return self._model

    @property
    def options(self) -> Options:
        """The options, frozen."""
        return self._options

    # ── calls ────────────────────────────────────────────────────────────────────────────────────────────────

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on ``micro-batch × gradientAccumulation × deviceIterations × replicationFactor`` samples."""
        self._check_samples(args, kwargs)
        first = self._pipe is None
        self._compile(args, kwargs)
        assert self._pipe is not None
        self._outputs.reset()
        inputs = args if not kwargs else kwargs if not args else hooks.bind_arguments(self._model, args, kwargs)
        directory = self._options.profile_dir if first else None
        name = "training" if self._training else "inference"
        with self._module_modes(), _profile(directory, name):
            if self._updater is not None:
                self._train(self._pipe, self._updater, inputs)
            else:
                self._seconds = [self._pipe.evaluate(inputs, outputs=self._outputs).seconds]
        return self._outputs.result()

    def _train(self, pipe: ps.Pipeline, updater: Updater, inputs: Any) -> None:
        iterations: int = self._options.device_iterations
        leaves, spec = hooks.tree_flatten(inputs)
        self._seconds = []
        pipe.zero_grad()
        for k in range(iterations):
            part = [leaf.chunk(iterations)[k] if isinstance(leaf, Tensor) and leaf.dim() else leaf for leaf in leaves]
            updater.prepare()
            self._seconds.append(pipe.step(hooks.tree_unflatten(part, spec)).seconds)
            updater.apply()

    def _check_samples(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._destroyed:
            raise Error("this model was destroyed: wrap the model again")
        options = self._options
        counts = options.device_iterations, options.replication_factor, options.Training.gradient_accumulation
        parts = counts[0] * counts[1] * counts[2]
        leaves = [leaf for leaf in hooks.tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor) and leaf.dim()]
        if not leaves:
            raise Error("a call takes tensors with samples along their first dimension: there are none")
        for leaf in leaves:
            require(
                len(leaf) % parts == 0 and len(leaf),
                f"Invalid batch dimension: In the input {leaf.shape}, the batch dimension ({len(leaf)}) must be a "
                f"multiple of Options.deviceIterations({counts[0]}) * Options.replicationFactor({counts[1]}) * "
                f"Options.Training.gradientAccumulation({counts[2]}) = {parts} because it is used to calculate the "
                "batch size which will be executed on the device in any given iteration.",
            )

    def _compile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._pipe is None:
            with self._module_modes():
                self._pipe = self._build(args, kwargs)
            logger.debug("%s: %r\n%s", self._kind, self._pipe, self._pipe.plan)
        self.copyWeightsToDevice()  # another wrapper of the same modules may have moved them

    def _build(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ps.Pipeline:
        options, updater = self._options, self._updater
        strategy = options.execution_strategy
        plan, ipus = plan_stages(self._model, strategy, (args, kwargs))
        turns = options.Training.gradient_accumulation if self._training else options.device_iterations
        if strategy.schedule != "sharded":
            self._warn_of_depth(plan.num_stages, turns)
        mean = options.Training.accumulation_and_replication_reduction_type == ReductionType.Mean
        off_chip = {kind: options.TensorLocations.off_chip(kind) for kind in ("optimizer", "activation", "weight")}
        if not self._training:
            off_chip |= {"optimizer": False, "activation": False}
        pipe = ps.Pipeline(
            plan,
            find_loss if self._training else lambda output, target: None,  # without targets it is not called
            microbatches=turns * options.replication_factor,
            schedule=strategy.schedule,
            devices=[device_of_ipu(ipu) for ipu in ipus],
            reduction="mean" if mean else "sum",
            outputs=self._outputs,
            seed=options.random_seed,
            recompute="always" if options._Popart.toDict().get("autoRecomputation") else "never",
            accumulate="fp32" if updater is not None and updater.accumulates_fp32 else None,
            offload=ps.Offload(
                optimizer=off_chip["optimizer"], activations=off_chip["activation"], weights=off_chip["weight"]
            )
            if any(off_chip.values())
            else None,
        )
        if updater is not None:
            updater.attach(pipe)
        return pipe

    def _warn_of_depth(self, stages: int, depth: int) -> None:
        """Warn where an IPU would refuse: too few micro-batches keep stages idle."""
        needed = 2 * stages - 1 if self._training else stages
        if stages > 1 and depth < needed:
            kind = "gradient accumulation factor" if self._training else "device iterations"
            option = "Training.gradientAccumulation" if self._training else "deviceIterations"
            warnings.warn(
                f"For pipelining, depth ({kind}) must equal at least the number of pipeline stages ({needed}) on IPUs. "
                f"Here {depth} runs too, with stages that wait: options.{option}({needed}) keeps them busy",
                stacklevel=5,
            )

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Build the pipeline for calls like this one, without running it."""
        self._check_samples(args, kwargs)
        self._compile(args, kwargs)

    def isCompiled(self) -> bool:
        return self._pipe is not None

    def setOptimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Continue with another optimizer, or with changed settings. One of the same class keeps the state."""
        if self._updater is None:
            raise Error("setOptimizer is for a model that poptorch.trainingModel made")
        self._updater.use(optimizer)

    # ── modes, weights, devices ──────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def _module_modes(self) -> Iterator[None]:
        """Set the modules to this executor's train and eval modes, and restore theirs afterwards."""
        modules = {self._model.get_submodule(path): mode for path, mode in self._modes.items()}
        before = {module: module.training for module in modules}
        try:
            for module, mode in modules.items():
                module.training = mode
            yield
        finally:
            for module, mode in before.items():
                module.training = mode

    def train(self, mode: bool = True) -> Self:
        """Run in training mode from now on; the model's own mode is not changed."""
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
        self._attached = False

    def copyWeightsToDevice(self) -> None:
        """Move parameters and buffers to the devices. Calls do it where needed."""
        self._move(None)
        self._attached = self._pipe is not None

    def _move(self, device: str | None) -> None:
        if self._pipe is not None and not self._destroyed:
            self._pipe.move(device)

    def state_dict(self) -> dict[str, Tensor]:
        """The model's state, on the CPU."""
        self.copyWeightsToHost()
        return self._model.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        return self._model.load_state_dict(state_dict, strict=strict)

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
        return self._attached and not self._destroyed

    def destroy(self) -> None:
        """Close the pipeline. The weights are on the CPU; the model can be used and wrapped again."""
        if self._pipe is not None and not self._destroyed:
            self.copyWeightsToHost()
            self._pipe.close()
        self._destroyed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.destroy()

    # ── files and measurements ───────────────────────────────────────────────────────────────────────────────

    def save(self, filename: str, export_model: bool = True) -> None:
        """Write the model, its options and its optimizer to a file, for ``poptorch.load``."""
        if not export_model:
            raise Error("save(export_model=False) would write an IPU's program alone, and there is none")
        self.copyWeightsToHost()
        content = {"format": _FORMAT, "model": self._model, "modes": self._modes, "options": self._options}
        optimizer = None if self._updater is None else self._updater.optimizer
        torch.save({**content, "training": self._training, "optimizer": optimizer}, filename)

    def compileAndExport(self, filename: str, *args: Any, **kwargs: Any) -> None:
        """``compile`` and ``save``."""
        self.compile(*args, **kwargs)
        self.save(filename)

    def getLatency(self) -> tuple[float, float, float]:
        """The minimum, maximum and mean seconds of an iteration of the last call."""
        if not self._seconds:
            raise Error("getLatency is of the last call, and there was none")
        return min(self._seconds), max(self._seconds), sum(self._seconds) / len(self._seconds)

    getComputeLatency = getLatency

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in _IPU_ONLY:
            raise Error(f"{name} is about an IPU, and there is none here")
        return getattr(self._model, name)

    def __repr__(self) -> str:
        return f"poptorch.{self._kind}({self._model!r})"


@contextmanager
def _profile(directory: str | None, name: str) -> Iterator[None]:
    """Write a Chrome trace to ``<directory>/<name>.json``; without a directory, do nothing."""
    if directory is None:
        yield
        return
    Path(directory).mkdir(parents=True, exist_ok=True)
    with torch.profiler.profile(experimental_config=profile_all_threads()) as profile:
        yield
    profile.export_chrome_trace(str(Path(directory) / f"{name}.json"))
