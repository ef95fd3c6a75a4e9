"""Tiny configurations and mini-batches for models of Hugging Face transformers."""

# ruff: noqa: C408 (settings are written as keyword arguments)
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo_models import BATCH, Entry, ids, mask, noise

# Applied where a configuration has the attribute; an entry's own settings win.
TINY: dict[str, Any] = dict(
    vocab_size=99, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=64, max_position_embeddings=64, head_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    type_vocab_size=2, decoder_start_token_id=2, image_size=32, patch_size=8, d_model=32, encoder_layers=2,
    decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
    layerdrop=0.0, encoder_layerdrop=0.0, decoder_layerdrop=0.0, num_channels=3,
)  # fmt: skip


def config_of(config_class: Any, settings: Mapping[str, Any]) -> Any:
    """A configuration of ``config_class`` with ``TINY`` and these settings, and no dropout."""
    default = config_class()
    known = {*vars(default), *config_class.attribute_map}
    if default.is_encoder_decoder:
        known.add("decoder_start_token_id")
    chosen = {key: value for key, value in TINY.items() if key in known}
    for key, value in vars(default).items():
        if isinstance(value, float) and "drop" in key:
            chosen[key] = 0.0
    for key, value in vars(default).items():  # some configurations take pairs where most take one number
        if key in ("image_size", "patch_size") and isinstance(value, (list, tuple)):
            chosen[key] = [chosen[key]] * len(value)
    chosen |= settings
    return config_class(**{key: value for key, value in chosen.items() if value is not ...})  # ... leaves it out


def model_of(name: str, settings: Mapping[str, Any], attributes: Mapping[str, Any] | None = None) -> nn.Module:
    import transformers

    made = getattr(transformers, name)
    config = config_of(made.config_class, settings)
    for key, value in (attributes or {}).items():
        setattr(config, key, value)
    model: nn.Module = made(config)
    return model


def entry(name: str, inputs: Callable[[], Any], *, label: str = "", help: Any = None, own_loss: bool | None = None,
          eval_mode: bool = False, **settings: Any) -> Entry:  # fmt: skip
    """An entry of a class of transformers; the loss is the model's own where the mini-batch has labels."""
    if own_loss is None:
        keys = inputs() if isinstance(inputs(), dict) else {}
        own_loss = any(key in LABELS for key in keys)
    build = lambda: model_of(name, settings)  # noqa: E731
    return Entry(name + label, build, inputs, own_loss=own_loss, help=help or {}, eval_mode=eval_mode)


LABELS = {"labels", "start_positions", "next_sentence_label", "mc_labels", "return_loss", "future_values",
          "class_labels", "mask_labels", "target_values", "sentence_order_label"}  # fmt: skip


# ── mini-batches ───────────────────────────────────────────────────────────────────────────────────────────────────


def tokens(length: int = 16) -> dict[str, Tensor]:
    return {"input_ids": ids(BATCH, length), "attention_mask": mask(length)}


def lm(length: int = 16) -> dict[str, Tensor]:
    return {**tokens(length), "labels": ids(BATCH, length)}


def lm_unmasked(length: int = 16) -> dict[str, Tensor]:
    return {"input_ids": ids(BATCH, length), "labels": ids(BATCH, length)}


def seqcls(length: int = 16) -> dict[str, Tensor]:
    return {**tokens(length), "labels": torch.tensor([0, 1, 1, 0])}


def tokcls(length: int = 16) -> dict[str, Tensor]:
    return {**tokens(length), "labels": ids(BATCH, length) % 2}


def qa(length: int = 16) -> dict[str, Tensor]:
    start = torch.tensor([1, 2, 3, 4])
    return {**tokens(length), "start_positions": start, "end_positions": start + 4}


def choice(length: int = 16) -> dict[str, Tensor]:
    two = torch.stack([mask(length), mask(length)], dim=1)
    return {"input_ids": ids(BATCH, 2, length), "attention_mask": two, "labels": torch.tensor([0, 1, 1, 0])}


def nsp(length: int = 16) -> dict[str, Tensor]:
    return {**lm(length), "next_sentence_label": torch.tensor([0, 1, 1, 0])}


def seq2seq(length: int = 16, target: int = 12) -> dict[str, Tensor]:
    return {**tokens(length), "labels": ids(BATCH, target, seed=3)}


def image(size: int = 32, channels: int = 3) -> dict[str, Tensor]:
    return {"pixel_values": noise(BATCH, channels, size, size)}


def image_class(size: int = 32, channels: int = 3) -> dict[str, Tensor]:
    return {**image(size, channels), "labels": torch.tensor([0, 1, 1, 0])}
