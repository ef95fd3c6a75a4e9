"""What the layers of a model cost, and what lies between devices: plain data, measured, computed or written by hand.

    costs = ModelCosts.load("costs.json")
    costs.layers[3].forward      # seconds for one micro-batch of costs.samples samples
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Crossing", "LayerCosts", "Link", "ModelCosts", "SharedParameters"]


@dataclass(frozen=True)
class LayerCosts:
    """One layer, for one micro-batch: seconds and bytes."""

    name: str
    forward: float
    input_gradient: float
    weight_gradient: float
    recompute: float  # the forward once more, without what need not be repeated
    activation: float  # what its backward needs, from F to W
    parameters: float
    gradients: float
    optimizer: float  # its states of the optimizer
    buffers: float = 0.0

    @property
    def work(self) -> float:
        """Forward and backward."""
        return self.forward + self.input_gradient + self.weight_gradient


@dataclass(frozen=True)
class Crossing:
    """What goes from one layer to a later one: the activation to the next, or a skip."""

    src: int
    dst: int
    bytes: float


@dataclass(frozen=True)
class SharedParameters:
    """Bytes of parameters that several layers have (a tie): a stage that has several of these layers has them once."""

    layers: tuple[int, ...]
    bytes: float


@dataclass(frozen=True)
class Link:
    """From one device to another: a value of n bytes arrives after ``latency + n / bandwidth`` seconds."""

    latency: float = 0.0
    bandwidth: float = float("inf")


@dataclass(frozen=True)
class ModelCosts:
    """All layers, for micro-batches of ``samples`` samples."""

    layers: tuple[LayerCosts, ...]
    crossings: tuple[Crossing, ...]
    samples: int = 1
    shared: tuple[SharedParameters, ...] = ()
    kept_together: tuple[tuple[int, int, float], ...] = ()  # (layer, layer, bytes) of activations that both keep, once
    link: Link = field(default_factory=Link)
    device: str = "cpu"
