"""Gradients over ranks: reduction over replicas, clipping by the global norm, and a shared loss scale."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
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
from penstock.compat.torchdistpackage.topology import tpc

__all__ = ["NaiveDDP", "NativeScalerPP", "clip_grad_norm_", "defer_reduction"]


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
        """Does nothing: gradients that are complete have been reduced already."""

    def after_backwards(self, count: int = 1) -> None:
        """Count backwards, and reduce the gradients when ``num_grad_acc_iter`` is reached."""
        self._backwards += count
        if self._backwards >= self.num_grad_acc_iter:
            self._backwards = 0
            if self.process_group is not None:
                _reduce(self.module.parameters(), self.process_group, mean=self.mean)

    def _on_grad(self, parameter: Tensor) -> None:
        if self.require_backward_grad_sync and not self._in_backward:
            self._in_backward = True
            queue_callback(self._on_backward_end)

    def _on_backward_end(self) -> None:
        self._in_backward = False
        self.after_backwards()


@contextmanager
def defer_reduction(microbatches: int) -> Iterator[None]:
    """Let wrapped modules that are called in this context reduce their gradients once, at its end.

    ``DistributedDataParallel`` reduces in the first backward after its last forward; in a pipeline, later backwards
    add to the gradients.
    """
    called: list[Any] = []

    def look(module: Any, args: Any) -> None:
        wrapper = isinstance(module, (DistributedDataParallel, NaiveDDP))
        if not wrapper or module in called or not torch.is_grad_enabled() or not module.require_backward_grad_sync:
            return
        if isinstance(module, DistributedDataParallel) and (module.static_graph or ddp_comm_hooks(module)):
            raise ps.PlanError(
                "a pipeline does not support static_graph=True and communication hooks of DistributedDataParallel: "
                "leave them out"
            )
        called.append(module)
        module.require_backward_grad_sync = False

    hook = register_module_forward_pre_hook(look)
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
    """Replace gradients by their mean or sum over a group; a parameter without a gradient anywhere keeps none."""
    parameters = [p for p in parameters if p.requires_grad]
    if not parameters or group.size() == 1:
        return
    used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(used, dist.ReduceOp.MAX, group)
    buckets: dict[Any, list[Tensor]] = {}  # by device and dtype
    for parameter, anywhere in zip(parameters, used.tolist(), strict=True):
        if anywhere:
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
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients so that their norm over all model ranks is at most ``max_norm``; return the norm before.

    Every model rank calls it, with or without gradients. A parameter whose gradient is the same on all tensor ranks
    counts once; of other parameters, each tensor rank is taken to have a part.
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

    Gradients are compared by norm and a sum with non-repeating weights: parts of one parameter may have equal norms,
    but hardly equal weighted sums.
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
    loss_scale = 1.0  # set by GradScaler, whose pipeline this is

    def __init__(self, **options: Any) -> None:
        """``options`` are those of ``penstock.GradScaler``. Every rank of the world creates one."""
        super().__init__(self, **options)

    def max_over_ranks(self, number: float) -> float:
        """The largest number of all ranks; ``GradScaler`` calls it."""
        largest = torch.tensor(number, dtype=torch.float64, device=tpc.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return float(largest)

    def bwd_fn(self, output: Any, grad: Any) -> None:
        """The backward of ``forward_backward`` with a scaled loss."""
        if grad is None:
            self.scale(output).backward()
            return
        pairs = [(output, grad)] if isinstance(output, Tensor) else list(zip(output, grad, strict=True))
        tensors = [tensor for tensor, its in pairs if its is not None]
        torch.autograd.backward(tensors, [its for _, its in pairs if its is not None])

    def __call__(
        self,
        loss: Any,
        optimizer: Optimizer | None,
        clip_grad: float | None = None,
        parameters: Iterable[Tensor] | None = None,
        create_graph: bool = False,
        need_update: bool = True,
    ) -> Tensor | None:
        """Step, and update the scale; return the gradients' norm if they are clipped.

        A loss with a graph is scaled and gets its backward first. Without ``need_update`` that is all.
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
