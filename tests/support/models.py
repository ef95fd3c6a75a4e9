"""Small models, reference steps of the plain model, and comparisons."""

from __future__ import annotations

import copy
import gc
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "PlainResult",
    "StatefulLayer",
    "assert_same",
    "batch",
    "gradients",
    "labels",
    "mlp",
    "penstock_threads",
    "plain_step",
    "snapshot",
    "stateful_model",
    "threads_end",
]


def mlp(layers: int = 4, width: int = 4, seed: int = 0) -> nn.Sequential:
    """Linear layers with a tanh after each but the last, ``2 * layers - 1`` modules in all."""
    torch.manual_seed(seed)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*parts[:-1])


def batch(samples: int = 8, width: int = 4, seed: int = 1) -> Tensor:
    return torch.randn(samples, width, generator=torch.Generator().manual_seed(seed))


def labels(samples: int = 8, classes: int = 4, seed: int = 2) -> Tensor:
    return torch.randint(classes, (samples,), generator=torch.Generator().manual_seed(seed))


class StatefulLayer(nn.Module):
    """A layer whose forward changes buffers, attributes and a parameter, and uses random numbers."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("replaced", torch.zeros(1))
        self.calls, self.log = 0, list[int]()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.replaced = self.count * 2
        self.calls += 1
        self.log.append(self.calls)
        self.cache = x
        with torch.no_grad():
            self.scale.mul_(0.5)
        return x * self.scale + torch.rand(4, device=x.device) + random.random()


def stateful_model() -> nn.Sequential:
    """Layers with state that a forward changes, in mixed training modes, one with an existing gradient."""
    model = nn.Sequential(
        nn.Linear(4, 4),
        nn.BatchNorm1d(4),
        nn.Dropout(0.5),
        StatefulLayer(),
        nn.utils.spectral_norm(nn.Linear(4, 4)),
        nn.ReLU(inplace=True),
        nn.Linear(4, 4).requires_grad_(False),
        nn.Linear(4, 4),
    )
    model.train()
    model[2].eval()
    model[0].weight.grad = torch.full((4, 4), 3.0)
    return model


@dataclass(frozen=True)
class PlainResult:
    """Loss, output, gradients and state of the plain model after a mini-batch."""

    loss: Tensor
    output: Any
    gradients: dict[str, Tensor | None]
    state: dict[str, Tensor]


def gradients(named: nn.Module | Iterable[tuple[str, Tensor]]) -> dict[str, Tensor | None]:
    """Copies of the parameters' gradients by name."""
    pairs = named.named_parameters() if isinstance(named, nn.Module) else named
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in pairs}


def plain_step(
    model: nn.Module, x: Any, y: Any = None, loss_fn: Callable[..., Any] | None = None, steps: int = 1
) -> PlainResult:
    """Run ``steps`` forwards and backwards on a copy of the model."""
    copied = copy.deepcopy(model)
    for _ in range(steps):
        output = copied(x)
        loss = output if loss_fn is None else loss_fn(output, y)
        loss.backward()
    return PlainResult(loss.detach(), output, gradients(copied), copied.state_dict())


def snapshot(model: nn.Module) -> dict[str, Any]:
    """State that a failed construction or a failed step must leave unchanged."""
    return {
        "state": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "gradients": gradients(model),
        "modes": [module.training for module in model.modules()],
        "flags": [p.requires_grad for p in model.parameters()],
    }


def assert_same(actual: Any, expected: Any, *, rtol: float = 1e-4, atol: float = 1e-6) -> None:
    """Compare nested values; mappings must have the same keys and None must match None."""
    if isinstance(expected, Mapping):
        assert set(actual) == set(expected)
        for name in expected:
            try:
                assert_same(actual[name], expected[name], rtol=rtol, atol=atol)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None
    elif isinstance(expected, (tuple, list)):
        assert type(actual) is type(expected)
        assert len(actual) == len(expected)
        for mine, theirs in zip(actual, expected, strict=True):
            assert_same(mine, theirs, rtol=rtol, atol=atol)
    elif isinstance(expected, Tensor):
        assert isinstance(actual, Tensor), f"expected a tensor, got {actual!r}"
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=True)
    else:
        assert actual == expected


def penstock_threads() -> set[threading.Thread]:
    """The worker threads of all pipelines of this process."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("penstock")}


def threads_end(threads: Iterable[threading.Thread], seconds: float = 5.0) -> bool:
    """Whether all these threads end within ``seconds``."""
    threads = list(threads)
    if threads:
        gc.collect()  # a pipeline that failed ends its threads when it is collected
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)
