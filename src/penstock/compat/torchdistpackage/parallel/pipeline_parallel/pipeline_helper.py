"""From a model to this rank's layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from penstock.compat.torchdistpackage.dist.process_topo import tpc
from penstock.split.flatten import flatten
from penstock.split.partition import partition

__all__ = ["CallableModule", "flat_and_partition", "flatten_model", "partition_balanced", "partition_uniform"]

Entry = str | nn.Module | Callable[..., Any]


class CallableModule(nn.Module):
    """A function as a layer."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)


def flatten_model(
    model: nn.Module, layer_list: Iterable[Entry], return_list: bool = False
) -> nn.Sequential | list[nn.Module]:
    """The layers of a model, in the order in which they run: names, modules and functions.

    The name of an ``nn.Sequential`` or ``nn.ModuleList`` stands for its members.
    """
    entries: list[str | nn.Module] = []
    for layer in layer_list:
        if isinstance(layer, (str, nn.Module)):
            entries.append(layer)
        elif callable(layer):
            entries.append(CallableModule(layer))
        else:
            raise NotImplementedError(f"a layer must be a name, a module or a function, got {layer!r}")
    layers = list(flatten(model, entries, partial=True))
    return layers if return_list else nn.Sequential(*layers)


def partition_uniform(flat_sequence: Any, extra_len: int = 0) -> Any:
    """This rank's layers: as many on each rank, and on the last one what is left, too.

    ``extra_len`` counts as so many more layers at the end: the last rank has less of the others then.
    """
    size, rank = tpc.get_group_size("pipe"), tpc.get_group_rank("pipe")
    each = (len(flat_sequence) + extra_len) // size
    return flat_sequence[rank * each : None if rank == size - 1 else (rank + 1) * each]


def partition_balanced(flat_sequence: Any) -> Any:
    """This rank's layers, with the heaviest rank's number of parameters as small as it can be."""
    size, rank = tpc.get_group_size("pipe"), tpc.get_group_rank("pipe")
    counts = [1 + sum(p.numel() for p in layer.parameters()) for layer in flat_sequence]
    groups = partition(counts, size)
    first = sum(groups[:rank])
    return flat_sequence[first : first + groups[rank]]


def flat_and_partition(sequential: nn.Module, flat_level: int = 1, partition_policy: str = "uniform") -> nn.Sequential:
    """This rank's layers of a Sequential, with Sequentials in it taken apart, ``flat_level`` levels deep."""
    policies: dict[str, Callable[[Sequence[nn.Module]], Any]]
    policies = {"uniform": partition_uniform, "balanced": partition_balanced}
    if partition_policy not in policies:
        raise NotImplementedError(f"partition_policy must be 'uniform' or 'balanced', got {partition_policy!r}")
    layers = list(sequential.children())
    for _ in range(flat_level):
        layers = [
            child
            for layer in layers
            for child in (layer.children() if isinstance(layer, (nn.Sequential, nn.ModuleList)) else [layer])
        ]
    return nn.Sequential(*policies[partition_policy](layers))
