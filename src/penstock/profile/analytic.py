"""Analytic costs of transformers on hardware that need not be present, computed from FLOPs and bytes.

    costs = analytic_costs("gpt:175b", "h100", samples=1, tensor=8)

The time of a layer is the sum of three parts: its matrix products at the effective rate of the hardware, the bytes that
its other operations read and write, and the all-reduces among the ``tensor`` devices that share it:

    attention   norm · QKV ▣ · scores ▣ · softmax · values ▣ · out ▣ · dropout + residual    ▣ matrix product
    mlp         norm · in ▣ · GELU · out ▣ · dropout + residual                              · bytes read and written

Each weight has a product of the same size in F, in I and in W. The attention core (scores, softmax, values) has no
weights: for each of its products, I has two products and W has none.

Activation bytes follow Korthikanti et al. (arXiv 2205.05198): s·b·h·(34 + 5·a·s/h) for a GPT in half precision. Without
``sequence_parallel``, a part of them is divided among the ``tensor`` devices; with it, all are.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial

from penstock.errors import PlanError, did_you_mean
from penstock.profile.costs import Crossing, LayerCosts, Link, ModelCosts, SharedParameters, check_counts, check_number

# ── hardware ─────────────────────────────────────────────────────────────────────────────────────────────────────

TERA, GIGA, GIB = 1e12, 1e9, float(1 << 30)


@dataclass(frozen=True)
class Hardware:
    """A device and its links.

    The peak is that of dense matrix products in half precision. Bandwidths are per device and direction.
    ``efficiency``, ``memory_share`` and ``link_share`` are assumptions. To change one:
    ``replace(get_hardware("h100"), efficiency=0.7)``.
    """

    name: str
    flops: float  # peak per second
    memory: float  # bytes
    memory_bandwidth: float  # bytes per second
    intra_node: float  # bytes per second to a device of the same node
    inter_node: float  # bytes per second to a device of another node
    devices_per_node: int = 8
    efficiency: float = 0.65  # fraction of the peak that large matrix products reach
    memory_share: float = 0.8  # fraction of the bandwidth that memory-bound operations reach
    link_share: float = 0.8  # fraction of the bandwidth that messages of some megabytes reach
    intra_node_latency: float = 5e-6
    inter_node_latency: float = 10e-6

    def __post_init__(self) -> None:
        for one in fields(self)[1:]:
            value = getattr(self, one.name)
            check_number(value, f"hardware {self.name!r}: {one.name}")
            if value == 0 and not one.name.endswith("latency"):
                raise PlanError(f"hardware {self.name!r}: {one.name} is 0: it must be above 0")
            if value > 1 and one.name in ("efficiency", "memory_share", "link_share"):
                raise PlanError(f"hardware {self.name!r}: {one.name} is {value}: it must be at most 1")

    def link(self, devices: int) -> Link:
        """The slowest link between neighbours among ``devices`` devices: within a node, or between nodes."""
        if devices <= self.devices_per_node:
            return Link(self.intra_node_latency, self.intra_node * self.link_share)
        return Link(self.inter_node_latency, self.inter_node * self.link_share)

    def compute(self, flops: float) -> float:
        """Seconds of large matrix products."""
        return flops / (self.flops * self.efficiency)

    def move(self, size: float) -> float:
        """Seconds to read or write ``size`` bytes."""
        return size / (self.memory_bandwidth * self.memory_share)

    def all_reduce(self, size: float, devices: int) -> float:
        """Seconds of a ring all-reduce of ``size`` bytes over ``devices`` devices."""
        if devices == 1:
            return 0.0
        link = self.link(devices)
        return link.latency + 2 * (devices - 1) / devices * size / link.bandwidth


HARDWARE = {
    one.name: one
    for one in (
        # NVIDIA V100 data sheet: 125 TFLOP/s, 32 GB, 900 GB/s, NVLink 300 GB/s both ways. DGX-1: four 100 Gb/s links
        # for eight GPUs.
        Hardware("v100", 125 * TERA, 32 * GIB, 900 * GIGA, 150 * GIGA, 6.25 * GIGA, efficiency=0.7),
        # NVIDIA A100 data sheet: 312 TFLOP/s, NVLink 600 GB/s both ways; 80 GB: 2,039 GB/s, 40 GB: 1,555 GB/s.
        # DGX A100: a 200 Gb/s link per GPU.
        Hardware("a100", 312 * TERA, 80 * GIB, 2039 * GIGA, 300 * GIGA, 25 * GIGA, efficiency=0.7),
        Hardware("a100-40gb", 312 * TERA, 40 * GIB, 1555 * GIGA, 300 * GIGA, 25 * GIGA, efficiency=0.7),
        # NVIDIA H100 data sheet (SXM): 1,979 TFLOP/s with sparsity, half of it without, 80 GB, 3.35 TB/s, NVLink
        # 900 GB/s both ways. DGX H100: a 400 Gb/s link per GPU.
        Hardware("h100", 989.5 * TERA, 80 * GIB, 3350 * GIGA, 450 * GIGA, 50 * GIGA),
        # NVIDIA H200 data sheet: as the H100, with 141 GB at 4.8 TB/s.
        Hardware("h200", 989.5 * TERA, 141 * GIGA, 4800 * GIGA, 450 * GIGA, 50 * GIGA),
        # NVIDIA DGX B200 data sheet, per GPU of eight: 36 PFLOP/s in FP8 without sparsity, half of it in FP16,
        # 1,440 GB, 64 TB/s, NVLink 14.4 TB/s both ways, 400 Gb/s links.
        Hardware("b200", 2250 * TERA, 180 * GIGA, 8000 * GIGA, 900 * GIGA, 50 * GIGA),
        # NVIDIA L40S data sheet: 362 TFLOP/s, 48 GB, 864 GB/s, no NVLink: PCIe 4.0 x16, 64 GB/s both ways. A
        # 200 Gb/s link for each two GPUs is an assumption.
        Hardware("l40s", 362 * TERA, 48 * GIGA, 864 * GIGA, 32 * GIGA, 12.5 * GIGA, efficiency=0.6),
        # Assumption: a server with 32 cores and eight channels of DDR5.
        Hardware("cpu", 4 * TERA, 256 * GIB, 300 * GIGA, 20 * GIGA, 12.5 * GIGA, devices_per_node=2, efficiency=0.5),
    )
}


def get_hardware(name: str | Hardware) -> Hardware:
    if isinstance(name, Hardware):
        return name
    key = str(name).lower()
    if key not in HARDWARE:
        hint = did_you_mean(key, HARDWARE, otherwise=f": known are {', '.join(HARDWARE)}")
        raise PlanError(f"hardware {name!r} is not known{hint}")
    return HARDWARE[key]


# ── models ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Transformer:
    """A decoder: an embedding, ``layers`` layers of attention and MLP, and a head."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    seq: int
    ffn: int = 0  # width of the MLP; 0: four times hidden
    kv: int = 0  # key and value heads; 0: as many as heads
    llama: int = 0  # 1: gated MLP, RMSNorm, no biases or dropout, rotary embedding, untied head

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            minimum = 0 if one.name in ("ffn", "kv", "llama") else 1
            if type(value) is not int or value < minimum:
                raise PlanError(f"a model with {one.name}={value!r}: it must be a whole number, from {minimum} up")
        if self.hidden % self.heads:
            raise PlanError(f"a model of hidden={self.hidden} cannot have {self.heads} heads: heads must divide hidden")
        if self.heads % (self.kv or self.heads):
            raise PlanError(f"a model of {self.heads} heads cannot have kv={self.kv}: kv must divide heads")
        if self.llama > 1:
            raise PlanError(f"a model with llama={self.llama}: write 1 for a Llama, 0 for a GPT")

    @property
    def width(self) -> int:
        """Width of the MLP."""
        return self.ffn or 4 * self.hidden

    @property
    def kv_width(self) -> int:
        """Width of the keys, and of the values."""
        return self.hidden // self.heads * (self.kv or self.heads)

    @property
    def attention_weights(self) -> int:
        return 2 * self.hidden * (self.hidden + self.kv_width)

    @property
    def mlp_weights(self) -> int:
        return (3 if self.llama else 2) * self.hidden * self.width

    @property
    def parameters(self) -> int:
        """Number of parameters; tied parameters count once."""
        h = self.hidden
        norms_and_biases = 2 * h if self.llama else 7 * h + 2 * self.kv_width + self.width
        ends = self.vocab * h * (2 if self.llama else 1)
        rest = h if self.llama else (self.seq + 2) * h  # last norm, and position embedding
        return self.layers * (self.attention_weights + self.mlp_weights + norms_and_biases) + ends + rest

    def flops(self, batch: int) -> float:
        """FLOPs of the matrix products of a step, forward and backward, without recompute."""
        tokens = batch * self.seq
        weights = self.layers * (self.attention_weights + self.mlp_weights) + self.vocab * self.hidden
        return 3.0 * tokens * (2 * weights + self.layers * 4 * self.seq * self.hidden)


_gpt_model = partial(Transformer, vocab=51200, seq=2048)
_llama_model = partial(Transformer, vocab=128256, seq=8192, kv=8, llama=1)

MODELS = {
    # Narayanan et al., arXiv 2104.04473, table 1
    "gpt:1.7b": _gpt_model(24, 2304, 24),
    "gpt:3.6b": _gpt_model(30, 3072, 32),
    "gpt:7.5b": _gpt_model(36, 4096, 32),
    "gpt:18b": _gpt_model(40, 6144, 48),
    "gpt:39b": _gpt_model(48, 8192, 64),
    "gpt:76b": _gpt_model(60, 10240, 80),
    "gpt:145b": _gpt_model(80, 12288, 96),
    "gpt:310b": _gpt_model(96, 16384, 128),
    # Korthikanti et al., arXiv 2205.05198, table 3; the last two are in both
    "gpt:22b": _gpt_model(48, 6144, 64),
    "gpt:175b": _gpt_model(96, 12288, 96),
    "gpt:530b": _gpt_model(105, 20480, 128),
    "gpt:1t": _gpt_model(128, 25600, 160),
    # Grattafiori et al., arXiv 2407.21783, table 3
    "llama:8b": _llama_model(32, 4096, 32, ffn=14336),
    "llama:70b": _llama_model(80, 8192, 64, ffn=28672),
    "llama:405b": _llama_model(126, 16384, 128, ffn=53248),
}


def parse_transformer(text: str) -> Transformer:
    """Parse ``"gpt:175b"``, ``"gpt:175b,seq=4096"`` or ``"layers=24,hidden=2048,heads=16,vocab=50304,seq=1024"``."""
    first, *others = (part.strip() for part in str(text).lower().split(","))
    numbers: dict[str, int] = {}
    known = [one.name for one in fields(Transformer)]
    if "=" in first:
        others.insert(0, first)
    elif first not in MODELS:
        hint = did_you_mean(first, MODELS, otherwise=f": known are {', '.join(MODELS)}")
        raise PlanError(f"model {first!r} is not known{hint}. For another model, write layers=24,hidden=2048,…")
    for part in others:
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in known:
            hint = did_you_mean(name, known, otherwise=f": it has {', '.join(known)}")
            raise PlanError(f"a model has no {name!r}{hint}")
        if not value.isascii() or not value.isdigit():
            raise PlanError(f"a model with {part!r}: write a whole number, as in {name}=8")
        if name in numbers:
            raise PlanError(f"a model with {name} given twice: {text!r}")
        numbers[name] = int(value)
    if "=" not in first:
        return replace(MODELS[first], **numbers)
    needed = [name for name in ("layers", "hidden", "heads", "vocab", "seq") if name not in numbers]
    if needed:
        raise PlanError(f"a model needs {' and '.join(needed)} as well, got {text!r}")
    return Transformer(**numbers)


# ── costs ────────────────────────────────────────────────────────────────────────────────────────────────────────


def analytic_costs(
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
    """The costs on one of the ``tensor`` devices that share each layer, for micro-batches of ``samples`` sequences.

    ``attention`` saves its core (``"plain"``), recomputes it in the backward (``"selective"``), or never stores it and
    skips the masked half (``"flash"``). With ``half_layers``, attention and MLP are separate layers. ``devices`` is the
    number of devices of a pipeline: if they fit into a node, the link is an intra-node link.

    A parameter takes ``item_bytes``, its gradient ``gradient_bytes``, and its optimizer state ``state_bytes`` (an fp32
    copy and two moments). The optimizer state may be sharded over ``optimizer_shards`` replicas.
    """
    model = parse_transformer(model) if isinstance(model, str) else model
    hardware = get_hardware(hardware)
    check_counts(samples=samples, tensor=tensor, optimizer_shards=optimizer_shards)
    check_counts(devices=1 if devices is None else devices)
    if attention not in ("plain", "selective", "flash"):
        raise PlanError(f"attention={attention!r} must be one of 'plain', 'selective', 'flash'")
    if model.heads % tensor or model.width % tensor:
        raise PlanError(f"{model.heads} heads and an MLP of {model.width} cannot be divided among {tensor} devices")
    if sequence_parallel and tensor == 1:
        raise PlanError("sequence_parallel needs several tensor-parallel devices: give tensor= too")
    gpt, h, e, kv = not model.llama, model.hidden, item_bytes, model.kv_width
    tokens = float(samples * model.seq)
    reduced = tokens * h * e  # bytes of an all-reduce
    replicated = 1 / tensor if sequence_parallel else 1.0

    def layer(
        name: str,
        *,
        weights: float,  # parameters of matrix products, sharded
        small: float,  # other parameters, replicated
        products: float,  # FLOPs with weights, in each of F, I and W
        core: tuple[float, float] = (0.0, 0.0),  # FLOPs without weights, in F and in I
        moved: float = 0.0,  # bytes read and written in F, sharded
        moved_replicated: float,
        moved_again: float = 0.0,  # bytes read and written in I to recompute the attention core
        kept: float = 0.0,  # activation bytes, sharded
        kept_replicated: float,
        reduced: float = reduced,
    ) -> LayerCosts:
        """The costs of a part of the model on one device, from its numbers for all tensor-parallel devices.

        Sharded numbers are divided by the number of devices, replicated ones only with sequence parallelism.
        """
        move = hardware.move(moved / tensor + moved_replicated * replicated)
        again, all_reduce = hardware.move(moved_again / tensor), hardware.all_reduce(reduced, tensor)
        forward = hardware.compute((products + core[0]) / tensor) + move + all_reduce
        backward = hardware.compute((products + core[1]) / tensor) + 2 * move + again + all_reduce
        parameters = weights / tensor + small
        return LayerCosts(
            name=name,
            forward=forward,
            input_gradient=backward if products else 0.0,  # an embedding has no input gradient
            weight_gradient=hardware.compute(products / tensor) if products else 2 * move,
            recompute=forward,
            activation=kept / tensor + kept_replicated * replicated,
            parameters=parameters * e,
            gradients=parameters * gradient_bytes,
            optimizer=parameters * (state_bytes / optimizer_shards),
        )

    embedding = layer(
        "embed",
        weights=model.vocab * h,
        small=model.seq * h * gpt,  # positions
        products=0,
        moved_replicated=tokens * h * ((5 if gpt else 2) * e + gpt),
        kept_replicated=tokens * (8 + h * gpt),  # token ids, and the dropout mask
    )
    scores = tokens * model.seq * model.heads
    in_memory = 0.0 if attention == "flash" else scores * ((4 if gpt else 2) * e + gpt)
    flops = 4 * tokens * model.seq * h / (2 if attention == "flash" else 1)
    attention_half = layer(
        "attention",
        weights=model.attention_weights + (h + 2 * kv) * gpt,
        small=3 * h if gpt else h,
        products=2 * tokens * model.attention_weights,
        core=(flops, flops * {"plain": 2, "selective": 3, "flash": 2.5}[attention]),
        moved=in_memory + tokens * (0.0 if gpt else 2 * e * (h + kv)),  # rotary embedding
        moved_replicated=tokens * h * (5 * e + gpt),  # norm: 1 read, 1 write; dropout and residual: 2 reads, 1 write
        moved_again=in_memory if attention == "selective" else 0.0,
        # Q, K, V and the output of the core; scores, and for GPT their softmax and its dropout mask
        kept=tokens * e * (2 * h + 2 * kv) + (scores * (2 * e + 1 if gpt else e) if attention == "plain" else 0.0),
        kept_replicated=tokens * h * (2 * e + gpt),  # the inputs of the norm and of QKV
    )
    inner = model.width * (2 if gpt else 3)  # values that GELU or the gate reads and writes
    mlp_half = layer(
        "mlp",
        weights=model.mlp_weights + model.width * gpt,
        small=3 * h if gpt else h,
        products=2 * tokens * model.mlp_weights,
        moved=tokens * inner * e,
        moved_replicated=tokens * h * (5 * e + gpt),
        kept=tokens * inner * e,
        kept_replicated=tokens * h * (2 * e + gpt),
    )
    head = layer(  # the last norm, the head, and the loss in float32
        "head",
        weights=model.vocab * h,
        small=2 * h if gpt else h,
        products=2 * tokens * model.vocab * h,
        moved=tokens * model.vocab * (e + 8),
        moved_replicated=tokens * h * 2 * e,
        kept=tokens * model.vocab * 4,
        kept_replicated=tokens * h * 2 * e,
        reduced=reduced / 2,  # in the backward only
    )
    numbers = [field.name for field in fields(LayerCosts)[1:9]]  # without buffers and optional ones
    whole = {name: getattr(attention_half, name) + getattr(mlp_half, name) for name in numbers}
    layers = [embedding]
    for i in range(model.layers):
        halves = [replace(half, name=f"layer.{i}.{half.name}") for half in (attention_half, mlp_half)]
        layers += halves if half_layers else [LayerCosts(f"layer.{i}", **whole)]
    layers.append(head)
    size = reduced / tensor if sequence_parallel else reduced
    tied = SharedParameters((0, len(layers) - 1), model.vocab * h / tensor * e)
    return ModelCosts(
        layers=tuple(layers),
        crossings=tuple(Crossing(i, i + 1, size) for i in range(len(layers) - 1)),
        samples=samples,
        shared=(tied,) if gpt else (),
        link=hardware.link(devices or hardware.devices_per_node + 1),
        device=hardware.name,
    )
