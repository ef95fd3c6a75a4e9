"""Parameters and state of a pipeline, for optimizers, checkpoints and loss scalers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.engine.executor import Executor
from penstock.engine.replicas.dtensor import distribute_like, is_dtensor, shard_groups, to_local
from penstock.errors import PlanError
from penstock.split.plan import Plan
from penstock.train.mesh import Mesh

DeviceOf = Callable[[nn.Parameter], torch.device | None]
_WRAPPER_NAMES = {"_orig_mod", "_checkpoint_wrapped_module"}  # inserted by torch.compile and checkpoint_wrapper


class FqnMap:
    """Maps the current name of a module, parameter, buffer or extra state to its fully qualified name in the model."""

    def __init__(self, model: nn.Module | None = None) -> None:
        """``model`` is the model before its stages were wrapped. Without a model, names are not changed."""
        self.names: set[str] = set()
        if model is not None:
            self.names |= {name for name, _ in model.named_modules(remove_duplicate=False)}
            self.names |= {name for name, _ in model.named_parameters(remove_duplicate=False)}
            self.names |= {name for name, _ in model.named_buffers(remove_duplicate=False)} | set(model.state_dict())

    def __call__(self, name: str) -> str:
        if not self.names or name in self.names:
            return name
        return ".".join(part for part in name.split(".") if part not in _WRAPPER_NAMES)


def share_buffers(source: nn.Module, target: nn.Module) -> None:
    """Set the buffers of ``target`` to those of ``source``, by the names of their submodules.

    When a module is moved, its parameters stay the same objects, but its buffers do not.
    """
    targets = dict(target.named_modules(remove_duplicate=False))
    for path, module in source.named_modules(remove_duplicate=False):
        other = targets.get(path)
        for name, buffer in module._buffers.items():
            if other is not None and other is not module and name in other._buffers:
                other._buffers[name] = buffer


class PipelineState:
    """The parameters and buffers of a pipeline's stages, in this process and of the whole model."""

    plan: Plan
    mesh: Mesh | None
    _model: nn.Module
    _modules: dict[int, nn.Module]
    _fqn: FqnMap
    _executor: Executor
    _loss_scale: float

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this process's stages, under the model's own names, each once."""
        seen: set[int] = set()
        for module in self._modules.values():
            for name, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield self._fqn(name), parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this process's stages, each once.

        A rank of a mesh without parameters yields an empty placeholder, because torch's optimizers do not accept an
        empty list and all ranks should run the same program.
        """
        own = [parameter for _, parameter in self.named_parameters()]
        if not own and self.mesh is not None:
            own = [vars(self).setdefault("_placeholder", nn.Parameter(torch.empty(0)))]
        return iter(own)

    @property
    def stage_modules(self) -> Mapping[int, nn.Module]:
        """The stages of this process, by index."""
        return MappingProxyType(self._modules)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as an optimizer's ``zero_grad``."""
        for module in self._modules.values():
            module.zero_grad(set_to_none)

    def move(self, device: torch.device | str | None = None) -> None:
        """Move the parameters and buffers of the stages to ``device``; without one, back to the stages' own devices.

        A step needs them on the stages' own devices. The model shares its parameters with the stages and moves with
        them. Offloaded weights (``Offload(weights=True)``) stay on the host.
        """
        self._executor.check_idle()
        weights = self._executor.weights
        stay = set() if weights is None else set(map(id, weights.host_tensors()))
        for stage, module in self._modules.items():
            there = torch.device(self._executor.stages[stage].device if device is None else device)
            share_buffers(self._model, module)
            module._apply(lambda tensor, there=there: tensor if id(tensor) in stay else tensor.to(there))  # type: ignore[no-untyped-call]
            share_buffers(module, self._model)

    def align_ties(self) -> None:
        """Copy the values of tied parameters from the model's parameters to their copies on other devices.

        Use it with an optimizer of the model's parameters, which do not include these copies.
        """
        self._executor.ties.align()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> Tensor:
        """Clip the gradients of the whole model by their norm over all ranks; return the norm on all ranks."""
        total = self.grad_norm(norm_type)
        clip_grad_norm(self.parameters(), total, max_norm, norm_type, error_if_nonfinite)
        return total

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of the gradients of the whole model, on all ranks; a parameter of several stages counts once."""
        executor = self._executor
        executor.check_idle()
        options: dict[str, Any] = {} if executor.weights is None else {"device_of": executor.weights.device_of}
        return grad_norm(self.parameters(), norm_type, executor.ties.counts_in_norm, executor.reduce, **options)

    def state_dict(self, *, full: bool = False) -> dict[str, Tensor]:
        """Parameters and buffers under the plain model's own names.

        Under a mesh these are this rank's stages; with ``full=True`` every rank gets the whole model's, on the CPU.
        DTensors stay sharded unless ``full``.
        """
        state: dict[str, Tensor] = {}
        for module in reversed(self._modules.values()):  # of several copies, the first stage's
            state |= {self._fqn(name): tensor for name, tensor in module.state_dict().items()}
        if full:
            state = self._executor.gather_state(state)
        names = dict.fromkeys((*map(self._fqn, self._model.state_dict()), *state))
        return {name: state[name] for name in names if name in state}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load a state dict of the plain model, or of a pipeline with any cuts. Under a mesh, a rank loads its part.

        A tied parameter may be present under only one of its names. DTensors load their shard of a plain tensor.
        """
        state, fqn = dict(state), self._fqn
        for tie in self.plan.ties:
            present = [name for name in tie.names if name in state]
            state.update({name: state[present[0]] for name in tie.names if present and name not in state})
        missing = sorted(set(self.state_dict()) - set(state))
        unexpected = sorted(set(state) - set(map(fqn, self._model.state_dict())))
        if strict and (missing or unexpected):
            raise PlanError(
                f"the state does not fit the model: missing {missing or 'nothing'}, unexpected "
                f"{unexpected or 'nothing'}. Pass strict=False to load the entries that fit"
            )
        for module in self._modules.values():
            fitting = {}
            for name, own in module.state_dict().items():
                if fqn(name) in state:
                    value = state[fqn(name)]
                    tensors = isinstance(value, Tensor) and isinstance(own, Tensor)  # not so for extra state
                    fitting[name] = distribute_like(value, own) if tensors else value
            module.load_state_dict(fitting, strict=False)

    def train(self, mode: bool = True) -> Self:
        """Put the stages of this process into training mode, as ``nn.Module.train``."""
        self._model.train(mode)
        for module in self._modules.values():
            module.train(mode)
        return self

    def eval(self) -> Self:
        """Put the stages of this process into evaluation mode."""
        return self.train(False)

    @property
    def training(self) -> bool:
        return self._model.training

    @property
    def loss_scale(self) -> float:
        """The factor of the gradients of ``step``, but not of its loss. A ``GradScaler`` sets it on every rank."""
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self._loss_scale = scale
        if self._executor.loss is not None:
            self._executor.loss.scale = scale

    @property
    def steps(self) -> int:
        """The number of training runs: calls of ``step`` and ``forward``, and calls with gradients.

        With ``seed=``, random numbers depend on it. It is not in ``state_dict()``, which has only the model's keys:
        save it separately, and set it on every rank when training is resumed.
        """
        return self._executor.num_runs["step"]

    @steps.setter
    def steps(self, steps: int) -> None:
        if not isinstance(steps, int) or steps < 0:
            raise PlanError(f"pipe.steps is a number of steps, at least 0: got {steps!r}")
        self._executor.num_runs["step"] = steps

    def max_over_ranks(self, number: float) -> float:
        """The maximum of a number over all ranks, on every rank. Every rank calls it."""
        self._executor.check_idle()
        return self._executor.max_over_ranks(number)

    def broadcast(self, value: Any) -> Any:
        """The value of the last stage's rank, on every rank: ``pipe.broadcast(pipe(x))``. Every rank calls it."""
        self._executor.check_idle()
        return self._executor.broadcast(value)


def grad_norm(
    parameters: Iterable[nn.Parameter],
    norm_type: float,
    counted_here: Callable[[nn.Parameter], bool] = lambda parameter: True,
    reduce: Callable[[Tensor, bool], Tensor] = lambda total, largest: total,
    device_of: DeviceOf = lambda parameter: None,
    reduce_plain: Callable[[Tensor, bool], Tensor] = lambda total, largest: total,
) -> Tensor:
    """The norm of the gradients, the same on every rank. Ranks without gradients take part.

    ``counted_here`` selects the parameters that this rank counts (a tied parameter counts once). ``reduce(x, largest)``
    returns the sum, or the maximum, of ``x`` over the ranks. Norms of sharded parameters are reduced over all processes
    that hold shards. If ``device_of`` returns a device, the norm of a gradient is computed there, because sums on the
    host round differently. ``reduce_plain`` is applied first to the norm of parameters that are not DTensors: it
    reduces over processes that hold parts of plain tensors.
    """
    parameters, norm_type = list(parameters), float(norm_type)
    devices = (device_of(p) or p.grad.device for p in parameters if p.grad is not None)
    total_device = next(devices, torch.device("cpu"))
    largest = math.isinf(norm_type)
    counted = [p for p in parameters if counted_here(p)]
    plain = _partial([p for p in counted if not is_dtensor(p)], norm_type, total_device, device_of)
    plain = reduce_plain(plain, largest)
    both = torch.stack([plain, *_over_shards([p for p in counted if is_dtensor(p)], norm_type, total_device)])
    total = reduce(both.max() if largest else both.sum(), largest)
    return total if largest else total.pow(1 / norm_type)


def clip_grad_norm(
    parameters: Iterable[nn.Parameter], total: Tensor, max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> None:
    """Scale gradients with the norm ``total`` to at most ``max_norm``."""
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(f"the norm of order {norm_type} of the gradients is {float(total)}: they cannot be clipped")
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            to_local(parameter.grad).mul_(scale.to(parameter.grad.device, parameter.grad.dtype))


def _partial(
    parameters: Sequence[nn.Parameter],
    norm_type: float,
    total_device: torch.device,
    device_of: DeviceOf = lambda _: None,
) -> Tensor:
    """The contribution of local gradients to the norm: a sum of powers, or the maximum."""
    total = torch.zeros(1, device=total_device)
    parts = [(to_local(p.grad), device_of(p) or p.grad.device) for p in parameters if p.grad is not None]
    norms = [
        # On the gradient's device, in at least single precision.
        torch.linalg.vector_norm(g.to(device), norm_type, dtype=torch.float32 if g.dtype.itemsize < 4 else None)
        for g, device in parts
        if g.numel()
    ]
    if norms:
        total = torch.stack([norm.to(total_device) for norm in norms])
    return total.max() if math.isinf(norm_type) else total.pow(norm_type).sum()


def _over_shards(parameters: Sequence[nn.Parameter], norm_type: float, total_device: torch.device) -> list[Tensor]:
    """The contributions of sharded parameters, reduced over the processes that hold shards; each shard counts once."""
    by_groups: dict[tuple[str, ...], list[nn.Parameter]] = {}
    for parameter in parameters:  # also without a gradient: all processes make the same collective calls
        key = tuple(group.group_name for group in shard_groups(parameter))
        by_groups.setdefault(key, []).append(parameter)
    totals = []
    for group in by_groups.values():
        first: Any = group[0]
        total = _partial(group, norm_type, torch.device(first.device_mesh.device_type))
        for processes in shard_groups(first):
            dist.all_reduce(total, dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM, processes)
        totals.append(total.to(total_device))
    return totals
