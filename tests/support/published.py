"""Published step times as a reference for analytic costs.

A row contains only figures that the source states. The fraction of peak FLOP/s that matrix products reach is an
assumption of ``hardware``, one number per device; a row tests the rest: the bubble, the collectives, the work besides
matrix products, and recomputation.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import PlanError
from penstock.profile.analytic import HARDWARE, MODELS, analytic_costs
from penstock.profile.costs import LayerCosts, ModelCosts

__all__ = ["PUBLISHED", "UNKNOWN_STAGE_COUNT", "Published", "step_seconds"]


def work_of(layer: LayerCosts) -> float:
    """Seconds of forward and backward."""
    return layer.forward + layer.full_backward


@dataclass(frozen=True)
class Published:
    """One run: model, hardware, parallelism and the seconds of a step."""

    source: str
    model: str
    hardware: str
    tensor: int
    pipe: int
    microbatch: int  # samples
    batch: int  # samples of one pipeline
    seconds: float
    interleaved: int | None = 1  # stages of a rank; None where the source does not say
    attention: str = "plain"
    sequence_parallel: bool = False
    recompute: bool = False  # all layers in full

    @property
    def devices(self) -> int:
        return self.tensor * self.pipe

    @property
    def utilization(self) -> float:
        """Model FLOPs utilization: the model's FLOP/s over the devices' peak."""
        peak = HARDWARE[self.hardware].flops
        return MODELS[self.model].flops(self.batch) / (self.seconds * self.devices * peak)

    def costs(self, *, half_layers: bool = False) -> ModelCosts:
        """The analytic costs of the layers."""
        return analytic_costs(
            self.model,
            self.hardware,
            samples=self.microbatch,
            tensor=self.tensor,
            sequence_parallel=self.sequence_parallel,
            attention=self.attention,
            half_layers=half_layers,
            devices=self.devices,
        )

    def estimate(self, interleaved: int | None = None) -> float:
        """The estimated seconds of a step, including the optimizer, which reads and writes all of its state.

        ``interleaved`` is for rows that do not state it.
        """
        costs, count = self.costs(), self.batch // self.microbatch
        moved = sum(layer.gradients + 2 * layer.optimizer + layer.parameters for layer in costs.layers) / self.pipe
        stages = interleaved or self.interleaved
        if stages is None:
            raise PlanError(f"{self.source} does not say how many stages a rank has: estimate(interleaved=…)")
        step = step_seconds(costs, self.pipe, count, interleaved=stages, recompute=self.recompute)
        return step + HARDWARE[self.hardware].move(moved)


def step_seconds(
    costs: ModelCosts, pipe: int, microbatches: int, *, interleaved: int = 1, recompute: bool = False
) -> float:
    """Seconds of a step of 1F1B by its formula.

    Ranks have equally many layers; embedding and head are with the first and the last layer. If the layers do not
    divide evenly, embedding and head count as a layer each.

    The slowest rank works all the time. The bubble is the other ranks' work on one micro-batch, divided by the stages
    per rank, plus the hops of the first micro-batch down and of the last one up.
    """
    ends = [costs.layers[0], costs.layers[-1]]
    inner = costs.layers[1:-1]
    ahead = 1 if len(inner) % pipe else 0  # the layer that the embedding counts as
    each, over = divmod(len(inner) + 2 * ahead, pipe)
    if over or microbatches < 1:
        raise PlanError(f"{len(inner)} layers cannot be divided evenly among {pipe} ranks")
    work = [work_of(layer) + (layer.recompute if recompute else 0.0) for layer in inner]
    ranks = [sum(work[max(0, rank * each - ahead) : (rank + 1) * each - ahead]) for rank in range(pipe)]
    ranks[0] += work_of(ends[0])
    ranks[-1] += work_of(ends[1])
    slowest = max(range(pipe), key=ranks.__getitem__)
    bubble = sum(time for rank, time in enumerate(ranks) if rank != slowest) / interleaved
    hops = 2 * (pipe * interleaved - 1) * costs.link.seconds(costs.crossings[0].bytes)
    return microbatches * ranks[slowest] + bubble + hops


# Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198: tables 3 (how)
# and 5 (seconds of an iteration). On A100 with 80 GB, without data parallelism. Each model runs twice: with all layers
# recomputed, and with their sequence parallelism and the core of the attention recomputed. Written down from memory of
# the paper: no copy of it was at hand.
_SOURCE = "arXiv 2205.05198, table 5"
_RUNS = [
    # model, pipe, interleaved, microbatch, batch, seconds with all recomputed, seconds with selective recomputation
    ("gpt:22b", 1, 1, 4, 4, 1.42, 1.10),
    ("gpt:175b", 8, 3, 1, 64, 18.13, 13.75),
    ("gpt:530b", 35, 3, 1, 280, 49.05, 37.83),
    ("gpt:1t", 64, 1, 1, 512, 94.42, 71.49),
]

PUBLISHED = tuple(
    row
    for model, pipe, interleaved, microbatch, batch, whole, selective in _RUNS
    for row in (
        Published(_SOURCE, model, "a100", 8, pipe, microbatch, batch, whole, interleaved, recompute=True),
        Published(_SOURCE, model, "a100", 8, pipe, microbatch, batch, selective, interleaved, "selective", True),
    )
)

# Grattafiori et al., "The Llama 3 Herd of Models", arXiv 2407.21783, table 4: TFLOP/s of a device, on H100, with 64 and
# 128 replicas. 1F1B is interleaved there, but the table does not say with how many stages a rank; a rank has eight
# layers, so it is one to eight. The sums over replicas, which are not here, hide behind the work. From memory, as well.
_LLAMA = "arXiv 2407.21783, table 4"


def _llama(batch: int, teraflops: float) -> Published:
    seconds = MODELS["llama:405b"].flops(batch) / (8 * 16 * teraflops * 1e12)
    return Published(_LLAMA, "llama:405b", "h100", 8, 16, 1, batch, seconds, None, "flash", True)


UNKNOWN_STAGE_COUNT = (_llama(32, 430.0), _llama(16, 400.0))
"""Rows without a number of stages: their seconds lie between the estimates for the largest and the smallest number."""
