"""Means and variances of values that come in parts: of each part, and of all together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

__all__ = ["Part", "measured", "merged", "together"]

_SLAB = 1 << 24  # so many values are looked at in one go: looking takes as much memory again

Part = tuple[int, Tensor, Tensor, Tensor]
"""Of some values per channel: how many, one of them, how far their mean is from that one, the sum of squares about it.

The mean alone would be rounded to its own size, and a large one says nothing then of how means differ.
"""


def measured(x: Tensor) -> Part | None:
    """The statistics of one micro-batch; None where there is nothing in it."""
    if not x.numel():
        return None
    dtype, dims = torch.promote_types(x.dtype, torch.float32), [0, *range(2, x.dim())]
    parts = []
    for rows in torch.split(x.detach(), max(1, _SLAB * len(x) // x.numel())):
        one = (rows[0].flatten(1)[:, 0] if x.dim() > 2 else rows[0]).to(dtype)
        var, shift = torch.var_mean(rows.to(dtype) - one.view(-1, *[1] * (x.dim() - 2)), dims, correction=0)
        count = rows.numel() // x.shape[1]
        parts.append((count, one, shift, var * count))
    return merged(parts)


def merged(parts: Sequence[Part]) -> Part:
    """The statistics of all of them. Never a difference of large sums: distances between means are squared as such."""
    if len(parts) == 1:
        return parts[0]
    counts, *tensors = zip(*parts, strict=True)
    ones, shifts, squares = (torch.stack(column) for column in tensors)
    away = (ones - ones[0]) + shifts  # of each mean, from one value of the first
    shift = _weighted(away, counts) / sum(counts)
    return sum(counts), ones[0], shift, squares.sum(0) + _weighted((away - shift).square_(), counts)


def _weighted(rows: Tensor, counts: Sequence[int]) -> Tensor:
    """The sum of the rows, each times its count. Counts stay on the host; rows that share one are taken together."""
    total, start = torch.zeros_like(rows[0]), 0
    for count, group in groupby(counts):
        end = start + len(list(group))
        total.add_(rows[start:end].sum(0), alpha=count)
        start = end
    return total


def together(rows: Sequence[Sequence[Part | None]], like: Tensor | None) -> list[list[Part]]:
    """The parts of each call, from all replicas; one that had no samples has seen no call."""
    calls: list[list[Part]] = [[] for _ in range(max(map(len, rows)))]
    for row in rows:
        for parts, part in zip(calls, row, strict=False):
            if part is not None and like is not None:
                count, one, shift, square = part
                parts.append((count, one.to(like.device), shift.to(like.device), square.to(like.device)))
    return calls
