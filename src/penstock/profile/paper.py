"""What a transformer costs on hardware that is not here: computed from operations and bytes.

A layer takes as long as its matrix products at the rate that the hardware reaches, the bytes that its other operations
read and write, and the sums among the devices that share it (``tensor``):

    attention   norm · QKV ▣ · scores ▣ · softmax · values ▣ · out ▣ · dropout + residual    ▣ a matrix product
    mlp         norm · in ▣ · GELU · out ▣ · dropout + residual                              · bytes read and written

For each weight there is one product of the same size in F, in I and in W. The core of the attention (scores, softmax,
values) has no weights: its gradients are two products for one, all in I.

Bytes that are kept are those of Korthikanti et al. (arXiv 2205.05198): for a GPT s·b·h·(34 + 5·a·s/h) in half
precision, of which a part is divided among ``tensor`` devices, and all with ``sequence_parallel``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.errors import PlanError
from penstock.profile.costs import Crossing, LayerCosts, ModelCosts, SharedParameters
from penstock.profile.described import Transformer, describe
from penstock.profile.hardware import Hardware, hardware_of

__all__ = ["costs_on_paper"]

ATTENTION = ("plain", "selective", "flash")


@dataclass(frozen=True)
class _Part:
    """A part of a model, for all devices that share it together: operations, bytes and parameters.

    What is ``whole`` is done and kept by each of them alike, unless the sequence is divided too.
    """

    weights: float  # parameters of matrix products, which are divided
    small: float  # other parameters, which each device has
    products: float  # operations with weights, in one of F, I and W
    core: float = 0.0  # operations without, in F
    core_backward: float = 0.0
    moved: float = 0.0  # bytes read and written in F, divided
    moved_whole: float = 0.0
    moved_again: float = 0.0  # bytes read and written once more in I, for what is computed again there
    kept: float = 0.0
    kept_whole: float = 0.0


@dataclass(frozen=True)
class _Setting:
    """How a model is run."""

    hardware: Hardware
    tokens: float
    tensor: int
    sequence_parallel: bool
    attention: str
    item: float  # bytes of a value
    gradient: float
    state: float

    def costs(self, name: str, part: _Part, sums: float, *, inputs: bool = True) -> LayerCosts:
        """The costs of a part on one device; ``sums`` are the bytes that its devices sum up, each way."""
        hardware, t = self.hardware, self.tensor
        whole = 1 / t if self.sequence_parallel else 1.0
        moved = hardware.move(part.moved / t + part.moved_whole * whole)
        again = hardware.move(part.moved_again / t)
        summed = hardware.all_reduce(sums, t)
        forward = hardware.compute((part.products + part.core) / t) + moved + summed
        backward = hardware.compute((part.products + part.core_backward) / t) + 2 * moved + again + summed
        parameters = part.weights / t + part.small
        return LayerCosts(
            name=name,
            forward=forward,
            input_gradient=backward if inputs else 0.0,
            weight_gradient=hardware.compute(part.products / t) if inputs else 2 * moved,
            recompute=forward,
            activation=part.kept / t + part.kept_whole * whole,
            parameters=parameters * self.item,
            gradients=parameters * self.gradient,
            optimizer=parameters * self.state,
        )


def costs_on_paper(
    model: str | Transformer,
    hardware: str | Hardware,
    *,
    samples: int = 1,
    tensor: int = 1,
    sequence_parallel: bool = False,
    attention: str = "flash",
    half_layers: bool = False,
    devices: int | None = None,
    item_bytes: float = 2,
    gradient_bytes: float = 4,
    state_bytes: float = 12,
    optimizer_shards: int = 1,
) -> ModelCosts:
    """What one of the ``tensor`` devices that share each layer takes for micro-batches of ``samples`` sequences.

    ``attention`` keeps all of its core (``"plain"``), computes it again in the backward (``"selective"``), or never has
    it in memory, and leaves out what the mask hides (``"flash"``). ``half_layers`` lets attention and MLP be layers of
    their own. ``devices`` are those of one pipeline: the link is one inside of a machine if they fit there.

    A parameter takes ``item_bytes``, its gradient ``gradient_bytes``, and its optimizer's states ``state_bytes`` (a
    copy in float32 and two moments), which may be divided among ``optimizer_shards`` replicas.
    """
    model = describe(model) if isinstance(model, str) else model
    for what, number in (("samples", samples), ("tensor", tensor), ("optimizer_shards", optimizer_shards)):
        _check_count(what, number)
    if devices is not None:
        _check_count("devices", devices)
    if attention not in ATTENTION:
        raise PlanError(f"attention={attention!r} must be one of {', '.join(map(repr, ATTENTION))}")
    if model.heads % tensor or model.width % tensor:
        raise PlanError(f"{model.heads} heads and an MLP of {model.width} cannot be divided among {tensor} devices")
    if sequence_parallel and tensor == 1:
        raise PlanError("sequence_parallel divides what tensor devices do alike: say tensor= too")
    setting = _Setting(
        hardware_of(hardware),
        float(samples * model.seq),
        tensor,
        sequence_parallel,
        attention,
        item_bytes,
        gradient_bytes,
        state_bytes / optimizer_shards,
    )
    sums = setting.tokens * model.hidden * item_bytes
    layers = [setting.costs("embed", _embedding(model, setting), sums, inputs=False)]
    for i in range(model.layers):
        halves = [
            setting.costs(f"layer.{i}.attention", _attention(model, setting), sums),
            setting.costs(f"layer.{i}.mlp", _mlp(model, setting), sums),
        ]
        layers += halves if half_layers else [_joined(f"layer.{i}", *halves)]
    layers.append(setting.costs("head", _head(model, setting), sums / 2))  # they sum up in its backward alone
    size = sums / tensor if sequence_parallel else sums
    tied = SharedParameters((0, len(layers) - 1), model.vocab * model.hidden / tensor * item_bytes)
    return ModelCosts(
        layers=tuple(layers),
        crossings=tuple(Crossing(i, i + 1, size) for i in range(len(layers) - 1)),
        samples=samples,
        shared=() if model.llama else (tied,),
        link=setting.hardware.link(devices or setting.hardware.per_machine + 1),
        device=setting.hardware.name,
    )


def _attention(model: Transformer, setting: _Setting) -> _Part:
    h, e, tokens = model.hidden, setting.item, setting.tokens
    scores = tokens * model.seq * model.heads  # how many
    mask = 0 if model.llama else 1  # a byte for each value that dropout may drop
    core = 4 * tokens * model.seq * h
    again = setting.attention == "selective"
    if setting.attention == "flash":
        core, core_backward = core / 2, 2.5 * core / 2
    else:
        core_backward = (3 if again else 2) * core
    in_memory = 0.0 if setting.attention == "flash" else scores * ((2 if model.llama else 4) * e + mask)
    kept_core = scores * (2 * e + mask if not model.llama else e) if setting.attention == "plain" else 0.0
    rotary = 2 * e * (h + model.kv_width) if model.llama else 0.0
    return _Part(
        weights=model.attention_weights + (0 if model.llama else h + 2 * model.kv_width),
        small=h if model.llama else 3 * h,
        products=2 * tokens * model.attention_weights,
        core=core,
        core_backward=core_backward,
        moved=in_memory + tokens * rotary,
        moved_whole=tokens * h * (5 * e + mask),  # norm: in and out; then dropout and residual: two in, one out
        moved_again=in_memory if again else 0.0,
        kept=tokens * e * (2 * h + 2 * model.kv_width) + kept_core,  # Q, K, V and what comes of them
        kept_whole=tokens * h * (2 * e + mask),  # the inputs of the norm and of QKV
    )


def _mlp(model: Transformer, setting: _Setting) -> _Part:
    h, e, tokens = model.hidden, setting.item, setting.tokens
    mask = 0 if model.llama else 1
    inner = model.width * (3 if model.llama else 2)  # what GELU, or the gate, reads and writes
    return _Part(
        weights=model.mlp_weights + (0 if model.llama else model.width),
        small=h if model.llama else 3 * h,
        products=2 * tokens * model.mlp_weights,
        moved=tokens * inner * e,
        moved_whole=tokens * h * (5 * e + mask),
        kept=tokens * inner * e,
        kept_whole=tokens * h * (2 * e + mask),
    )


def _embedding(model: Transformer, setting: _Setting) -> _Part:
    h, tokens = model.hidden, setting.tokens
    mask = 0 if model.llama else 1
    return _Part(
        weights=model.vocab * h,
        small=0 if model.llama else model.seq * h,  # positions
        products=0,
        moved_whole=tokens * h * ((2 if model.llama else 5) * setting.item + mask),
        kept_whole=tokens * (8 + h * mask),  # the token's number, and what dropout dropped
    )


def _head(model: Transformer, setting: _Setting) -> _Part:
    """The last norm, the head and the loss, which is computed in float32."""
    h, e, tokens = model.hidden, setting.item, setting.tokens
    return _Part(
        weights=model.vocab * h,
        small=h if model.llama else 2 * h,
        products=2 * tokens * model.vocab * h,
        moved=tokens * model.vocab * (e + 8),
        moved_whole=tokens * h * 2 * e,
        kept=tokens * model.vocab * 4,
        kept_whole=tokens * h * 2 * e,
    )


def _joined(name: str, one: LayerCosts, two: LayerCosts) -> LayerCosts:
    both: dict[str, Any] = {
        what: getattr(one, what) + getattr(two, what)
        for what in ("forward", "input_gradient", "weight_gradient", "recompute", "activation")
    }
    both |= {what: getattr(one, what) + getattr(two, what) for what in ("parameters", "gradients", "optimizer")}
    return LayerCosts(name, **both)


def _check_count(what: str, number: object) -> None:
    if type(number) is not int or number < 1:
        raise PlanError(f"{what}={number!r} must be a whole number, from 1 up")
