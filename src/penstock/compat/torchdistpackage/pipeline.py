"""``forward_backward``: a 1F1B pipeline of functions, one per rank; and helpers that partition models.

rank 0   F0 F1 F2 · · B0 …       F: fwd_fn([output of the rank before, *this rank's own inputs])
rank 1   ·  F0 F1 · B0 F2 …      B: bwd_fn(output, grad), or autograd's backward; on the last rank grad is None
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import penstock as ps
from penstock.compat import unwrap_local_errors
from penstock.compat.torchdistpackage.gradients import defer_reduction
from penstock.compat.torchdistpackage.topology import tpc
from penstock.hooks import tree_flatten, tree_unflatten

__all__ = [
    *("CallableModule", "flat_and_partition", "flatten_model", "forward_backward", "forward_eval"),
    *("partition_balanced", "partition_uniform"),
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
    output of the rank before (the items of a tuple one by one) followed by this rank's inputs: as a list, or alone if
    it is one value. On the last rank ``fwd_fn`` returns the loss. Gradients of micro-batches are summed, not averaged.
    ``bwd_fn(output, grad)`` runs the backward, with None for ``grad`` on the last rank. With an ``optimizer``,
    gradients are zeroed first.

    Tensors are sent with their own dtypes, shapes and structure: ``dtype`` and ``scatter_gather_tensors`` are unused.
    """
    if optimizer is not None:
        optimizer.zero_grad()
    own = [*inputs] if isinstance(inputs, (list, tuple)) else [] if inputs is None else [inputs]
    if tpc.pipeline is None:
        _build_pipeline()
    pipeline, stage = tpc.pipeline, tpc.stage
    with nullcontext() if forward_only else defer_reduction(num_microbatches), unwrap_local_errors():
        try:
            pipeline.max_over_ranks(0.0)  # a rank that failed, or is gone, is reported here
            count = _agree_on_count(own, num_microbatches, not forward_only)
            rows = [[_map_tensors(value, partial(_part, count=count, index=k)) for value in own] for k in range(count)]
            stage.begin(fwd_fn, bwd_fn, rows)
            (pipeline.evaluate if forward_only else pipeline.step)(torch.empty(count, 0) if stage.first else None)
            return stage.last_output
        except ps.PlanError:  # nothing has begun
            raise
        except BaseException:
            tpc.close_pipeline()  # the next call builds a new one
            raise
        finally:
            stage.begin(None, None, ())


def forward_eval(fwd_fn: Forward, inputs: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The forward of one mini-batch in one piece; on the last rank this is the model's output."""
    return forward_backward(None, fwd_fn, None, inputs, num_microbatches=1, forward_only=True, dtype=dtype)


def _build_pipeline() -> None:
    """Create a pipeline whose stages call functions that each rank has for itself."""
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


def _agree_on_count(own: Sequence[Any], microbatches: int, training: bool) -> int:
    """The number of micro-batches; raises the same error on all ranks if their mini-batches do not fit together."""
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
        self.functions, self.rows = (fwd_fn, bwd_fn), rows  # in a tuple: a module among them is not a child
        self.last_output: Any = None

    def forward(self, value: Any) -> Any:
        current = ps.current_microbatch()
        fwd_fn, bwd_fn = self.functions
        assert current is not None
        assert fwd_fn is not None
        leaves, spec = tree_flatten(() if self.first else value)
        # Without a bwd_fn autograd goes through the function; with one, the function has a graph of its own.
        apart = bwd_fn is not None and torch.is_grad_enabled()
        inputs = [
            leaf.detach().requires_grad_(leaf.requires_grad) if apart and isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        ]
        value = tree_unflatten(inputs, spec)
        values = [*(value if isinstance(value, (tuple, list)) else [value]), *self.rows[current.index]]
        output = fwd_fn(values[0] if len(values) == 1 else values)
        if current.index == len(self.rows) - 1:
            self.last_output = _map_tensors(output, Tensor.detach)
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
            elif any(grad is not None for grad in grads):  # with None this would look like the last rank
                arrived = iter(grads)
                bwd_fn(output, tree_unflatten([next(arrived) if _has_grad(leaf) else None for leaf in outputs], spec))
            return [x.grad for x in inputs if isinstance(x, Tensor)]

        anchor = torch.empty(0, requires_grad=True)  # so that the results have a graph in any case
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        results = iter(_Exit.apply(run_backward, list(filter(_has_grad, outputs)), anchor, *tensors))  # type: ignore[no-untyped-call]
        return tree_unflatten([next(results) if _has_grad(leaf) else leaf for leaf in outputs], spec)


def _has_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


class _Exit(torch.autograd.Function):
    """The outputs of a stage, and a backward by ``bwd_fn`` through the stage's own graph."""

    @staticmethod
    def forward(ctx: Any, run_backward: Any, outputs: Sequence[Tensor], anchor: Tensor, *tensors: Tensor) -> Any:
        ctx.run_backward = run_backward
        ctx.set_materialize_grads(False)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        with torch.enable_grad():
            return None, None, None, *ctx.run_backward(grads)


def _map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    leaves, spec = tree_flatten(value)
    return tree_unflatten([function(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def _part(leaf: Tensor, count: int, index: int) -> Tensor:
    """One micro-batch of a tensor. ``.data`` has its own version counter: parts may be changed in place."""
    part = torch.tensor_split(leaf, count)[index] if leaf.dim() else leaf
    return part if part.requires_grad else part.data


class CallableModule(nn.Module):
    """A function as a layer."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)


def flatten_model(
    model: nn.Module, layer_list: Iterable[str | nn.Module | Callable[..., Any]], return_list: bool = False
) -> nn.Sequential | list[nn.Module]:
    """The layers of a model in the order in which they run, given by names, modules and functions.

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
    """This rank's layers: equally many on each rank, the remainder on the last.

    ``extra_len`` counts as further layers at the end, so that the last rank gets fewer of the others.
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
