"""How two values differ, in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Alike"]


@dataclass(frozen=True)
class Alike:
    """Equal, or as near as the tolerances allow."""

    rtol: float
    atol: float

    def differ(self, whole: Any, staged: Any) -> tuple[str, float | None] | None:
        """How two values differ: in words, and the largest difference of two numbers."""
        if not (isinstance(whole, Tensor) and isinstance(staged, Tensor)):
            if isinstance(whole, Tensor) or isinstance(staged, Tensor) or type(whole) is not type(staged):
                return f"is {_kind(staged)}, in the whole model {_kind(whole)}", None
            comparable = isinstance(whole, int | float | complex | str | bytes | type(None))
            return (f"is {staged!r}, in the whole model {whole!r}", None) if comparable and whole != staged else None
        if whole.shape != staged.shape or whole.dtype != staged.dtype:
            return f"is {_kind(staged)}, in the whole model {_kind(whole)}", None
        a, b = (t.detach().to_dense() if t.layout is not torch.strided else t.detach() for t in (whole, staged))
        inexact = a.is_floating_point() or a.is_complex()
        if torch.equal(a, b) or (inexact and torch.allclose(a, b, self.rtol, self.atol, equal_nan=True)):
            return None
        wide = torch.complex128 if a.is_complex() else torch.float64
        apart = (a.to(wide) - b.to(wide)).abs().flatten().nan_to_num(torch.inf)
        apart[(a.isnan() & b.isnan()).flatten()] = 0
        place = int(apart.argmax())
        largest = float(apart[place])
        at = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), a.shape))
        here = f"at {list(at)} it is {b[at].item()}, in the whole model {a[at].item()}"
        return f"differs by up to {largest:.3g}: {here}", largest


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"
