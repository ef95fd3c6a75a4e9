"""Which skips go from which partition to which."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import nn

from penstock.split.skip import Namespace, SkipKey, Skippable

__all__ = ["SkipLayout", "inspect_skip_layout"]

Route = tuple[int, Namespace | None, str]


class SkipLayout:
    """The partitions that each skip leaves and enters."""

    def __init__(self, num_partitions: int, skip_routes: Mapping[SkipKey, tuple[int, int]]) -> None:
        self.by_ns_name = dict(skip_routes)
        self.by_partition: list[list[Route]] = [[] for _ in range(num_partitions)]
        self.by_src_partition: list[list[Route]] = [[] for _ in range(num_partitions)]
        for (ns, name), (src, dst) in skip_routes.items():
            self.by_partition[dst].append((src, ns, name))
            self.by_src_partition[src].append((dst, ns, name))
        for routes in (*self.by_partition, *self.by_src_partition):
            routes.sort(key=_order)

    def copy_policy(self, next_j: int) -> Iterator[Route]:
        """The skips that come to a partition from others: (from which, namespace, name)."""
        return (route for route in self.by_partition[next_j] if route[0] != next_j)

    def copy_policy_by_src(self, prev_j: int) -> Iterator[Route]:
        """The skips that leave a partition for others: (to which, namespace, name)."""
        return (route for route in self.by_src_partition[prev_j] if route[0] != prev_j)

    def requires_copy(self, ns: Namespace | None, name: str) -> bool:
        """Whether a skip goes from one partition to another."""
        src, dst = self.by_ns_name.get((ns, name), (-1, -1))
        return src != dst


def inspect_skip_layout(partitions: Iterable[nn.Module]) -> SkipLayout:
    """The skips of the layers in these partitions, which match (see ``verify_skippables``)."""
    routes: dict[SkipKey, tuple[int, int]] = {}
    stashed: dict[SkipKey, int] = {}
    count = 0
    for count, partition in enumerate(partitions, 1):
        for layer in partition.modules():
            if isinstance(layer, Skippable):
                stashed.update(dict.fromkeys(layer.stashes(), count - 1))
                routes.update({key: (stashed.pop(key), count - 1) for key in layer.pops()})
    return SkipLayout(count, routes)


def _order(route: Route) -> tuple[int, str, str]:
    other, ns, name = route
    return other, "" if ns is None else ns._id, name
