"""``trainingModel`` and ``inferenceModel``: a PyTorch model that is called as PopTorch's are, run by a pipeline."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from penstock.compat.poptorch import optim
from penstock.compat.poptorch.errors import Error, require
from penstock.compat.poptorch.options import Options
from penstock.compat.poptorch.outputs import Kept, Taker
from penstock.compat.poptorch.profiling import profiled
from penstock.compat.poptorch.running import pipeline_of
from penstock.compat.poptorch.updates import Updates
from penstock.engine.message import flatten
from penstock.engine.microbatch import batch_size, scatter
from penstock.split.chain import bind_arguments
from penstock.split.trace.cut_policy import switched
from penstock.train.pipeline import Pipeline

__all__ = ["PoplarExecutor", "inferenceModel", "trainingModel"]

logger = logging.getLogger("penstock.compat.poptorch")


def trainingModel(
    model: nn.Module, options: Options | None = None, optimizer: torch.optim.Optimizer | None = None
) -> PoplarExecutor:
    """The model, to be trained: a call is forward, backward and update, ``deviceIterations`` times.

    The model's forward computes the loss. Without an optimizer it is ``SGD(lr=0.01)``. The parameters are the model's
    own; modes (``train``, ``eval``) are those that the model has now.
    """
    return PoplarExecutor(model, options, training=True, optimizer=optimizer)


def inferenceModel(model: nn.Module, options: Options | None = None) -> PoplarExecutor:
    """The model, for its outputs: a call is the forward of ``deviceIterations`` micro-batches."""
    return PoplarExecutor(model, options, training=False)


class PoplarExecutor:
    """A model that runs on a pipeline. What it does not know itself, it asks the model for."""

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
        Kept(self._options, training=training)  # says what is wrong with the output mode
        self._model = model
        self._modes: dict[str, bool] = {path: module.training for path, module in model.named_modules()}
        self._pipe: Pipeline | None = None
        self._taker = Taker()
        self._updates: Updates | None = None
        self._attached = False
        self._destroyed = False
        self._seconds: list[float] = []
        if training:
            self._updates = Updates(self._options, optimizer or optim.SGD(model.parameters(), lr=0.01))

    @property
    def model(self) -> nn.Module:
        """The model, whose parameters these are."""
        return self._model

    @property
    def options(self) -> Options:
        """The options, frozen."""
        return self._options

    # ── calls ────────────────────────────────────────────────────────────────────────────────────────────────

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on ``micro-batch × gradientAccumulation × deviceIterations × replicationFactor`` samples."""
        samples = self._samples(args, kwargs)
        first = self._pipe is None
        self._compile(args, kwargs)
        assert self._pipe is not None
        kept = self._taker.kept = Kept(self._options, training=self._training)
        inputs = args if not kwargs else kwargs if not args else bind_arguments(self._model, args, kwargs)
        directory = self._options.profile_dir if first else None
        try:
            with switched(self._model, self._modes), profiled(directory, "training" if self._training else "inference"):
                if self._training:
                    self._train(self._pipe, inputs, samples)
                else:
                    self._seconds = [self._pipe.evaluate(inputs, outputs=self._taker).seconds]
        finally:
            self._taker.kept = None
        return kept.result()

    def _train(self, pipe: Pipeline, inputs: Any, samples: int) -> None:
        assert self._updates is not None
        iterations: int = self._options.device_iterations
        self._seconds = []
        pipe.zero_grad()
        for part in scatter(inputs, [samples // iterations] * iterations):
            self._updates.prepare()
            self._seconds.append(pipe.step(part).seconds)
            self._updates.apply()

    def _samples(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """The samples of a call, of which each update, replica and micro-batch gets as many as any other."""
        if self._destroyed:
            raise Error("this model was destroyed: wrap the model again")
        options = self._options
        counts = options.device_iterations, options.replication_factor, options.Training.gradient_accumulation
        parts = counts[0] * counts[1] * counts[2]
        for leaf in flatten((args, kwargs))[0]:
            if isinstance(leaf, Tensor) and leaf.dim():
                require(
                    len(leaf) % parts == 0 and len(leaf),
                    f"Invalid batch dimension: In the input {leaf.shape}, the batch dimension ({len(leaf)}) must be a "
                    f"multiple of Options.deviceIterations({counts[0]}) * Options.replicationFactor({counts[1]}) * "
                    f"Options.Training.gradientAccumulation({counts[2]}) = {parts} because it is used to calculate the "
                    "batch size which will be executed on the device in any given iteration.",
                )
        samples = batch_size((args, kwargs), "inputs")
        if samples is None:
            raise Error("a call takes tensors with samples along their first dimension: there are none")
        return samples

    def _compile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._pipe is None:
            with switched(self._model, self._modes):
                self._pipe = pipeline_of(self._model, self._options, self._updates, self._taker, args, kwargs)
            logger.debug("%s: %r\n%s", self._kind, self._pipe, self._pipe.plan)
        self.copyWeightsToDevice()  # another model, made of the same modules, may have placed them elsewhere

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Get ready for calls like this one, without running any."""
        self._samples(args, kwargs)
        self._compile(args, kwargs)

    def isCompiled(self) -> bool:
        """Whether a call, or ``compile``, has made the pipeline."""
        return self._pipe is not None

    def setOptimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Go on with another optimizer, or with what was changed in this one. State is kept where the kind is kept."""
        if self._updates is None:
            raise Error("setOptimizer is for a model that poptorch.trainingModel made")
        self._updates.use(optimizer)

    # ── modes, weights, devices ──────────────────────────────────────────────────────────────────────────────

    def train(self, mode: bool = True) -> Self:
        """Run in training mode from now on. The model's own mode is not changed, nor does it matter here."""
        self._modes = dict.fromkeys(self._modes, mode)
        return self

    def eval(self) -> Self:
        """Run in evaluation mode from now on."""
        return self.train(False)

    @property
    def training(self) -> bool:
        return self._modes[""]

    def copyWeightsToHost(self) -> None:
        """Bring the parameters and buffers to the host's memory, where the model itself can be run."""
        self._move("cpu")
        self._attached = False

    def copyWeightsToDevice(self) -> None:
        """Bring them to the devices. Calls do so where it is needed."""
        self._move(None)
        self._attached = self._pipe is not None

    def _move(self, device: str | None) -> None:
        if self._pipe is not None and not self._destroyed:
            self._pipe.move(device)

    def state_dict(self) -> dict[str, Tensor]:
        """The model's state, on the host."""
        self.copyWeightsToHost()
        return self._model.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load the model's state, which is this one's."""
        return self._model.load_state_dict(state_dict, strict=strict)

    def attachToDevice(self) -> None:
        """Get the devices; calls do it by themselves."""
        if self._pipe is None:
            raise Error("attachToDevice is for a compiled model: call it, or compile(…), first")
        self.copyWeightsToDevice()

    def detachFromDevice(self) -> None:
        """Give the devices' memory back: the weights go to the host until the next call."""
        if not self.isAttachedToDevice():
            raise Error("the model is not attached to a device")
        self.copyWeightsToHost()

    def isAttachedToDevice(self) -> bool:
        """Whether the weights are on the devices."""
        return self._attached and not self._destroyed

    def destroy(self) -> None:
        """End the pipeline. The weights are on the host, and the model can be used and wrapped again."""
        if self._pipe is not None and not self._destroyed:
            self.copyWeightsToHost()
            self._pipe.close()
        self._destroyed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.destroy()

    # ── the rest ─────────────────────────────────────────────────────────────────────────────────────────────

    def save(self, filename: str, export_model: bool = True) -> None:
        """Write the model, its options and its optimizer to a file, for ``poptorch.load``."""
        from penstock.compat.poptorch.saving import save

        if not export_model:
            raise Error("save(export_model=False) would write an IPU's program alone, and there is none")
        save(self, filename)

    def compileAndExport(self, filename: str, *args: Any, **kwargs: Any) -> None:
        """``compile`` and ``save``."""
        self.compile(*args, **kwargs)
        self.save(filename)

    def getLatency(self) -> tuple[float, float, float]:
        """The least, the greatest and the mean number of seconds of an iteration of the last call."""
        if not self._seconds:
            raise Error("getLatency is of the last call, and there was none")
        return min(self._seconds), max(self._seconds), sum(self._seconds) / len(self._seconds)

    getComputeLatency = getLatency

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in _IPU_ONLY:
            _refuse(name)
        return getattr(self._model, name)

    def __repr__(self) -> str:
        return f"poptorch.{self._kind}({self._model!r})"


_IPU_ONLY = ("cycleCount", "getHostIpuLatency", "getIpuHostLatency", "getPerfCounters", "loadExecutable", "rng_state")


def _refuse(name: str) -> NoReturn:
    raise Error(f"{name} is about an IPU, and there is none here")
