"""``forward_backward``: a 1F1B pipeline of functions, one per rank; partitions of models; gradients over ranks.

rank 0   F0 F1 F2 · · B0 …       F: fwd_fn([output of the rank before, *this rank's own inputs])
rank 1   ·  F0 F1 · B0 F2 …      B: bwd_fn(output, grad), or autograd's backward; on the last rank grad is None
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import penstock as ps
from penstock import hooks
from penstock._torch import ddp_comm_hooks, queue_callback
from penstock.compat import unwrap_local_errors
from penstock.compat.torchdistpackage.topology import tpc
from penstock.hooks import map_tensors, tree_flatten, tree_unflatten

__all__ = [
    *("CallableModule", "NaiveDDP", "NativeScalerPP", "clip_grad_norm_", "flat_and_partition", "flatten_model"),
    *("forward_backward", "forward_eval", "partition_balanced", "partition_uniform"),
]

Forward = Callable[[Any], Any]
Backward = Callable[[Any, Any], Any]


def forward_backward(
    optimizer: Any,
    fwd_fn: Forward,
    bwd_fn: Backward | None,
    inputs: Any,
    num_microbatches: int = 1,
    forward_only: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    scatter_gather_tensors: bool = False,
) -> Any:
    """Run one mini-batch; return the output of ``fwd_fn`` for the last micro-batch, detached.

    ``inputs``, a tensor or a list of tensors, are this rank's own inputs, split along dimension 0. ``fwd_fn`` gets the
    output of the previous rank (or the items of a tuple) and this rank's inputs: a list, or the value if there is only
    one. On the last rank ``fwd_fn`` returns the loss. Gradients of micro-batches are summed, not averaged.
    ``bwd_fn(output, grad)`` runs the backward, with None for ``grad`` on the last rank. With an ``optimizer``,
    gradients are zeroed first.

    Tensors are sent with their own dtypes, shapes and structure: ``dtype`` and ``scatter_gather_tensors`` are unused.
    """
    if optimizer is not None:
        optimizer.zero_grad()
    own = [*inputs] if isinstance(inputs, (list, tuple)) else [] if inputs is None else [inputs]
    if tpc.pipeline is None:
        ranks = tpc.get_ranks_in_group("pipe")
        stages = [FunctionStage(first=s == 0, last=s == len(ranks) - 1) for s in range(len(ranks))]
        tpc.stage = stages[tpc.get_group_rank("pipe")]
        tpc.pipeline = ps.Pipeline(
            ps.split(nn.Sequential(*stages), balance=[1] * len(stages)),
            lambda loss: [*loss] if isinstance(loss, tuple) else loss,  # a tuple would mean a sum and a count
            microbatch_size=1,  # the pipeline's input has one row per micro-batch
            schedule="1f1b",
            mesh=ps.Mesh(data=1, pipe=len(ranks), tensor=1, group=ranks, device=tpc.device),
            reduction="sum",
            outputs=None,
            dynamic=True,
        )
    pipeline, stage = tpc.pipeline, tpc.stage
    with nullcontext() if forward_only else defer_reduction(num_microbatches), unwrap_local_errors():
        try:
            pipeline.max_over_ranks(0.0)  # raises the error of a failed rank
            count = _agree_on_count(own, num_microbatches, not forward_only)
            rows = [[map_tensors(value, partial(_part, count, k)) for value in own] for k in range(count)]
            stage.begin(fwd_fn, bwd_fn, rows)
            (pipeline.evaluate if forward_only else pipeline.step)(torch.empty(count, 0) if stage.first else None)
            return stage.last_output
        except ps.PlanError:  # raised before the step
            raise
        except BaseException:
            tpc.close_pipeline()  # the next call builds a new one
            raise
        finally:
            stage.begin(None, None, ())


def forward_eval(fwd_fn: Forward, inputs: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The forward of one mini-batch in one piece; on the last rank this is the model's output."""
    return forward_backward(None, fwd_fn, None, inputs, num_microbatches=1, forward_only=True, dtype=dtype)


def _agree_on_count(own: Sequence[Any], microbatches: int, training: bool) -> int:
    """The number of micro-batches. Raises the same error on all ranks if their mini-batches do not fit together."""
    leaves = [leaf for value in own for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor) and leaf.dim()]
    calls: list[Any] = [None] * tpc.get_group_size("pipe")
    dist.all_gather_object(calls, (training, microbatches, [len(leaf) for leaf in leaves]), tpc.get_group("pipe"))
    samples = {number for _, _, numbers in calls for number in numbers}
    count: int = min([microbatches, *samples])
    uneven = len(samples) > 1 and any(number % microbatches for number in samples)
    if uneven or count < 1 or len({call[:2] for call in calls}) > 1:
        listed = (
            f"rank {rank}: {count} micro-batches of {numbers} samples, {'training' if trains else 'forward only'}"
            for rank, (trains, count, numbers) in zip(tpc.get_ranks_in_group("pipe"), calls, strict=True)
        )
        raise ps.PlanError(
            f"the ranks' mini-batches do not fit together: {'; '.join(listed)}. Give all ranks the same number of "
            "samples, or multiples of the number of micro-batches"
        )
    return count


class FunctionStage(nn.Module):
    """A stage that calls ``fwd_fn``, and in the backward pass ``bwd_fn`` if there is one."""

    def __init__(self, *, first: bool, last: bool) -> None:
        super().__init__()
        self.first, self.last = first, last
        self.begin(None, None, ())

    def begin(self, fwd_fn: Forward | None, bwd_fn: Backward | None, rows: Sequence[Sequence[Any]]) -> None:
        """Set the functions and this rank's own inputs per micro-batch."""
        self.functions: Any = (fwd_fn, bwd_fn)  # in a tuple: a module among them is not a child
        self.rows = rows
        self.last_output: Any = None

    def forward(self, value: Any) -> Any:
        current: Any = ps.current_microbatch()
        fwd_fn, bwd_fn = self.functions
        leaves, spec = tree_flatten(() if self.first else value)
        value = tree_unflatten(leaves, spec)
        if bwd_fn is not None and torch.is_grad_enabled():  # the graph of the function is separate
            value = map_tensors(value, lambda leaf: leaf.detach().requires_grad_(leaf.requires_grad))
        inputs, _ = tree_flatten(value)
        values = [*(value if isinstance(value, (tuple, list)) else [value]), *self.rows[current.index]]
        output = fwd_fn(values[0] if len(values) == 1 else values)
        if current.index == len(self.rows) - 1:
            self.last_output = map_tensors(output, Tensor.detach)
        if not torch.is_grad_enabled():
            return torch.zeros(()) if self.last else output
        if bwd_fn is None:
            return output
        outputs, spec = tree_flatten(torch.zeros((), requires_grad=True) if self.last else output)
        if not any(map(_has_grad, outputs)):
            return output

        def run_backward(grads: Sequence[Tensor | None]) -> list[Tensor | None]:
            if self.last:
                bwd_fn(output, None)
            elif any(grad is not None for grad in grads):  # None is for the last rank
                arrived = iter(grads)
                bwd_fn(output, tree_unflatten([next(arrived) if _has_grad(leaf) else None for leaf in outputs], spec))
            return [x.grad for x in inputs if isinstance(x, Tensor)]

        anchor = torch.empty(0, requires_grad=True)  # so that the results always have a graph
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        results = iter(_Exit.apply(run_backward, list(filter(_has_grad, outputs)), anchor, *tensors))  # type: ignore[no-untyped-call]
        return tree_unflatten([next(results) if _has_grad(leaf) else leaf for leaf in outputs], spec)


def _has_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


class _Exit(torch.autograd.Function):
    """The outputs of a stage, whose backward calls ``bwd_fn`` on the stage's separate graph."""

    @staticmethod
    def forward(ctx: Any, run_backward: Any, outputs: Sequence[Tensor], anchor: Tensor, *tensors: Tensor) -> Any:
        ctx.run_backward = run_backward
        ctx.set_materialize_grads(False)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        with torch.enable_grad():
            return None, None, None, *ctx.run_backward(grads)


def _part(count: int, index: int, leaf: Tensor) -> Tensor:
    """One micro-batch of a tensor. ``.data`` has its own version counter: parts may be changed in place."""
    part = torch.tensor_split(leaf, count)[index] if leaf.dim() else leaf
    return part if part.requires_grad else part.data


class CallableModule(nn.Module):
    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)


def flatten_model(
    model: nn.Module, layer_list: Iterable[str | nn.Module | Callable[..., Any]], return_list: bool = False
) -> nn.Sequential | list[nn.Module]:
    """The layers of a model in the order in which they run: names, modules and functions.

    The name of an ``nn.Sequential`` or ``nn.ModuleList`` stands for its members.
    """
    entries: list[str | nn.Module] = []
    for layer in layer_list:
        if not isinstance(layer, str) and not callable(layer):
            raise NotImplementedError(f"a layer must be a name, a module or a function, got {layer!r}")
        entries.append(layer if isinstance(layer, (str, nn.Module)) else CallableModule(layer))
    layers = list(ps.flatten(model, entries, partial=True))
    return layers if return_list else nn.Sequential(*layers)


def partition_uniform(flat_sequence: Any, extra_len: int = 0) -> Any:
    """This rank's layers: the same number on each rank, and the remainder on the last.

    ``extra_len`` is a number of additional layers at the end, so that the last rank gets fewer layers.
    """
    size, rank = tpc.get_group_size("pipe"), tpc.get_group_rank("pipe")
    each = (len(flat_sequence) + extra_len) // size
    return flat_sequence[rank * each : None if rank == size - 1 else (rank + 1) * each]


def partition_balanced(flat_sequence: Any) -> Any:
    """This rank's layers, with the largest number of parameters on any rank as small as possible."""
    size, rank = tpc.get_group_size("pipe"), tpc.get_group_rank("pipe")
    plan = ps.split(nn.Sequential(*flat_sequence), stages=size, balance="parameters")
    counts = [len(group) for group in plan.groups]
    first = sum(counts[:rank])
    return flat_sequence[first : first + counts[rank]]


def flat_and_partition(sequential: nn.Module, flat_level: int = 1, partition_policy: str = "uniform") -> nn.Sequential:
    """This rank's layers of a Sequential, after expanding nested Sequentials ``flat_level`` levels deep."""
    policies: dict[str, Callable[..., Any]] = {"uniform": partition_uniform, "balanced": partition_balanced}
    if partition_policy not in policies:
        raise NotImplementedError(f"partition_policy must be 'uniform' or 'balanced', got {partition_policy!r}")
    layers = list(sequential.children())
    for _ in range(flat_level):
        nested = [layer if isinstance(layer, (nn.Sequential, nn.ModuleList)) else [layer] for layer in layers]
        layers = [child for children in nested for child in children]
    return nn.Sequential(*policies[partition_policy](layers))


# ── gradients over ranks ─────────────────────────────────────────────────────────────────────────────────────────────


class NaiveDDP(nn.Module):
    """Broadcasts a module's parameters and reduces its gradients over ``process_group``.

    The default group is the data group of ``tpc``, or the world where ``tpc`` is not set up. Gradients are reduced at
    the end of every ``num_grad_acc_iter``-th backward; in ``forward_backward``, once at its end if its micro-batches
    complete that number. ``sync`` has no effect: a reduction is complete when the backward ends.
    """

    def __init__(
        self,
        module: nn.Module,
        sync: bool = False,
        *,
        process_group: dist.ProcessGroup | None = None,
        reduce_op: str = "avg",
        num_grad_acc_iter: int = 1,
    ) -> None:
        super().__init__()
        if reduce_op.lower() not in ("avg", "sum"):
            raise ValueError(f"reduce_op must be 'avg' or 'sum', got {reduce_op!r}")
        if process_group is None:
            process_group = tpc.get_group("data") if tpc.is_mode_inited("data") else None
            process_group = process_group if tpc.is_mode_inited("global") else dist.group.WORLD
        self.module, self.process_group = module, process_group
        self.mean, self.num_grad_acc_iter = reduce_op.lower() == "avg", num_grad_acc_iter
        self.require_backward_grad_sync = True
        self._backwards = 0  # since the last reduction
        self._in_backward = False
        if self.process_group is not None:
            first = dist.get_process_group_ranks(self.process_group)[0]
            for tensor in (*module.parameters(), *module.buffers()):
                dist.broadcast(tensor.data, first, self.process_group)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._on_grad)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def reduce_gradients(self) -> None:
        """No effect: complete gradients were reduced already."""

    def after_backwards(self, count: int = 1) -> None:
        """Count backwards, and reduce the gradients when ``num_grad_acc_iter`` is reached."""
        self._in_backward = False
        self._backwards += count
        if self._backwards >= self.num_grad_acc_iter:
            self._backwards = 0
            if self.process_group is not None:
                _reduce(self.module.parameters(), self.process_group, mean=self.mean)

    def _on_grad(self, parameter: Tensor) -> None:
        if self.require_backward_grad_sync and not self._in_backward:
            self._in_backward = True
            queue_callback(self.after_backwards)


@contextmanager
def defer_reduction(microbatches: int) -> Iterator[None]:
    """A context at whose end the wrapped modules that were called in it reduce their gradients, once.

    ``DistributedDataParallel`` reduces in the first backward after its last forward. In a pipeline, later backwards
    add to the gradients.
    """
    called: list[Any] = []

    def disable_sync(module: Any, args: Any) -> None:
        wrapper = isinstance(module, (DistributedDataParallel, NaiveDDP))
        if not wrapper or module in called or not torch.is_grad_enabled() or not module.require_backward_grad_sync:
            return
        if isinstance(module, DistributedDataParallel) and (module.static_graph or ddp_comm_hooks(module)):
            options = "static_graph=True and communication hooks of DistributedDataParallel"
            raise ps.PlanError(f"a pipeline does not support {options}: leave them out")
        called.append(module)
        module.require_backward_grad_sync = False

    hook = register_module_forward_pre_hook(disable_sync)
    try:
        yield
    finally:
        hook.remove()
        for wrapper in called:
            wrapper.require_backward_grad_sync = True
    for wrapper in called:
        if isinstance(wrapper, NaiveDDP):
            wrapper.after_backwards(microbatches)
        else:
            wrapper.require_forward_param_sync = True  # buffers are broadcast in the next forward
            named = wrapper.module.named_parameters()
            _reduce((p for name, p in named if name not in wrapper.parameters_to_ignore), wrapper.process_group)


@torch.no_grad()
def _reduce(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, *, mean: bool = True) -> None:
    """Replace gradients by their mean or sum over a group. A parameter without a gradient on all ranks has none."""
    parameters = [p for p in parameters if p.requires_grad]
    if not parameters or group.size() == 1:
        return
    used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(used, dist.ReduceOp.MAX, group)
    buckets: dict[Any, list[Tensor]] = {}  # by device and dtype
    for parameter, has_grad in zip(parameters, used.tolist(), strict=True):
        if has_grad:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = grad.to_dense() if grad.is_sparse else grad
            buckets.setdefault((grad.device, grad.dtype), []).append(parameter.grad)
    for bucket in buckets.values():
        flat = torch.cat([grad.reshape(-1) for grad in bucket])
        dist.all_reduce(flat, group=group)
        flat /= group.size() if mean else 1
        for grad, part in zip(bucket, torch.split(flat, [grad.numel() for grad in bucket]), strict=True):
            grad.copy_(part.view_as(grad))


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale gradients so that their norm over all model ranks is at most ``max_norm``; return the norm before.

    Every model rank calls it, with or without gradients. A parameter with the same gradient on all tensor ranks counts
    once. Other parameters are assumed to be split over the tensor ranks.
    """
    own: list[Any] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    shared = _shared_over_tensor_ranks(own) if _size("tensor") > 1 else set()
    first = _size("tensor") == 1 or tpc.is_first_in_group("tensor")
    total = hooks.grad_norm(
        own,
        norm_type,
        counted_here=lambda parameter: first or id(parameter) not in shared,
        reduce=partial(_all_reduce, "pipe"),
        reduce_plain=partial(_all_reduce, "tensor"),
    )
    hooks.clip_grad_norm(own, total, float(max_norm), norm_type, error_if_nonfinite)
    return total


def _size(mode: str) -> int:
    return tpc.get_group_size(mode) if tpc.is_mode_inited(mode) else 1


def _all_reduce(mode: str, total: Tensor, largest: bool) -> Tensor:
    if _size(mode) == 1:
        return total
    wide = total.to(tpc.device, torch.float64, copy=True)
    dist.all_reduce(wide, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, tpc.get_group(mode))
    return wide.to(total.device, total.dtype)


def _shared_over_tensor_ranks(parameters: Sequence[Any]) -> set[int]:
    """The ids of parameters whose gradients are the same on all tensor ranks, up to rounding.

    Gradients are compared by their norm and by a sum with non-repeating weights: parts of one parameter may have equal
    norms, but are unlikely to have equal weighted sums.
    """
    plain = [p for p in parameters if not isinstance(p, DTensor)]
    own = []
    for parameter in plain:
        grad = torch.zeros(1) if parameter.grad is None else parameter.grad
        flat = (grad.to_dense() if grad.is_sparse else grad).detach().flatten().to(torch.float64)
        weights = torch.cos(torch.arange(1, flat.numel() + 1, dtype=torch.float64, device=flat.device))
        own.append((float(flat.norm()), float(flat @ weights)))
    everyone: list[Any] = [None] * tpc.get_group_size("tensor")
    dist.all_gather_object(everyone, own, tpc.get_group("tensor"))
    shared = set()
    for parameter, first, *others in zip(plain, *everyone, strict=True):
        if all(abs(a - b) <= 1e-4 * first[0] for other in others for a, b in zip(first, other, strict=True)):
            shared.add(id(parameter))
    return shared


class NativeScalerPP(ps.GradScaler):
    """A float16 loss scale that all ranks of the world share: all of them step, or none.

    scaler = NativeScalerPP()
    loss = forward_backward(optimizer, fwd_fn, scaler.bwd_fn, inputs, …)
    scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
    """

    state_dict_key = "amp_scaler"
    loss_scale = 1.0  # set by GradScaler, which uses this object as its pipeline

    def __init__(self, **options: Any) -> None:
        """``options`` are those of ``penstock.GradScaler``. Every rank of the world creates one."""
        super().__init__(self, **options)

    def max_over_ranks(self, number: float) -> float:
        """The maximum of a number over all ranks, for ``GradScaler``."""
        largest = torch.tensor(number, dtype=torch.float64, device=tpc.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return float(largest)

    def bwd_fn(self, output: Any, grad: Any) -> None:
        """The backward of ``forward_backward`` with a scaled loss."""
        if grad is None:
            self.scale(output).backward()
            return
        pairs = [(output, grad)] if isinstance(output, Tensor) else list(zip(output, grad, strict=True))
        tensors = [tensor for tensor, gradient in pairs if gradient is not None]
        torch.autograd.backward(tensors, [gradient for _, gradient in pairs if gradient is not None])

    def __call__(
        self,
        loss: Any,
        optimizer: Optimizer | None,
        clip_grad: float | None = None,
        parameters: Iterable[Tensor] | None = None,
        create_graph: bool = False,
        need_update: bool = True,
    ) -> Tensor | None:
        """Step, and update the scale; return the norm of the gradients if they are clipped.

        First run the scaled backward of a loss with a graph. Without ``need_update``, do only this.
        """
        if isinstance(loss, Tensor) and loss.requires_grad:
            self.scale(loss).backward(create_graph=create_graph)
        if not need_update:
            return None
        norm = None
        if clip_grad is not None:
            assert parameters is not None, "clip_grad needs the parameters"
            self.unscale_(optimizer)
            norm = clip_grad_norm_(parameters, clip_grad)
        self.step(optimizer)
        self.update()
        return norm
