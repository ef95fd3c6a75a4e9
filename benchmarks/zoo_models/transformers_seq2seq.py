"""Encoder-decoders of transformers: text, speech and time series."""

# ruff: noqa: C408 (settings are written as keyword arguments)
from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.zoo_models import BATCH, Entry, ids, mask, noise
from benchmarks.zoo_models.transformers_common import config_of, entry, lm, seq2seq, tokens

T5 = dict(d_ff=64, d_kv=8, num_layers=2, num_decoder_layers=2, num_heads=4)

GEMMA = dict(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             intermediate_size=64, max_position_embeddings=64, head_dim=8, dropout_rate=0.0)  # fmt: skip


def mel(frames: int, bins: int = 16) -> dict[str, Tensor]:
    return {"input_features": noise(BATCH, bins, frames), "labels": ids(BATCH, 8)}


def speech() -> dict[str, Tensor]:
    return {"input_features": noise(BATCH, 32, 16), "attention_mask": mask(32, 4), "labels": ids(BATCH, 8)}


def cls2() -> dict[str, Tensor]:
    """Sequences that all end with the end-of-sequence token, which the classification heads read."""
    batch = tokens()
    batch["input_ids"][:, -1] = 2
    batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    return {**batch, "labels": torch.tensor([0, 1, 1, 0])}


def series(past: int = 19, future: int = 8, target: bool = True) -> dict[str, Tensor]:
    batch = {
        "past_values": noise(BATCH, past),
        "past_time_features": noise(BATCH, past, 2, seed=3),
        "past_observed_mask": torch.ones(BATCH, past),
        "future_time_features": noise(BATCH, future, 2, seed=4),
    }
    return {**batch, "future_values": noise(BATCH, future, seed=5)} if target else batch


def channels(length: int, extra: str, *shape: int) -> dict[str, Tensor]:
    return {"past_values": noise(BATCH, length, 3), extra: noise(BATCH, *shape, seed=6)}


def encoder_decoder() -> nn.Module:
    from transformers import BertConfig, EncoderDecoderConfig, EncoderDecoderModel

    both = EncoderDecoderConfig.from_encoder_decoder_configs(
        config_of(BertConfig, {"num_hidden_layers": 2}), config_of(BertConfig, {"num_hidden_layers": 2})
    )
    both.decoder_start_token_id, both.pad_token_id = 1, 0
    return EncoderDecoderModel(both)


def entries() -> list[Entry]:
    time = dict(prediction_length=8, context_length=16, lags_sequence=[1, 2, 3], num_time_features=2, scaling="mean")
    found = [
        entry(f"{name}ForConditionalGeneration", seq2seq)
        for name in ("Bart", "MBart", "Pegasus", "M2M100", "Blenderbot", "BlenderbotSmall", "PLBart")
    ]
    found += [
        entry("T5ForConditionalGeneration", seq2seq, **T5),
        entry("T5ForConditionalGeneration", seq2seq, label=" gated", **T5, feed_forward_proj="gated-gelu",
              tie_word_embeddings=False),
        entry("T5EncoderModel", tokens, **{**T5, "num_layers": 4}),
        entry("T5ForSequenceClassification", cls2, **T5),
        entry("MT5ForConditionalGeneration", seq2seq, **T5),
        entry("UMT5ForConditionalGeneration", seq2seq, **T5),
        entry("LongT5ForConditionalGeneration", seq2seq, **T5, local_radius=4),
        entry("SwitchTransformersForConditionalGeneration", seq2seq, **T5, num_experts=4, expert_capacity=8,
              router_jitter_noise=0.0),
        entry("BartForSequenceClassification", cls2),
        entry("BartModel", lambda: {**tokens(), "decoder_input_ids": ids(BATCH, 12)}),
        entry("BartForCausalLM", lm, decoder_layers=4),
        entry("BartForConditionalGeneration", seq2seq, label=" 4+4 layers", encoder_layers=4, decoder_layers=4),
        entry("MarianMTModel", seq2seq),
        entry("LEDForConditionalGeneration", seq2seq, attention_window=4, max_encoder_position_embeddings=64,
              max_decoder_position_embeddings=64),
        entry("BigBirdPegasusForConditionalGeneration", seq2seq, attention_type="original_full"),
        entry("PegasusXForConditionalGeneration", lambda: seq2seq(32), block_size=8, num_global_tokens=4),
        entry("ProphetNetForConditionalGeneration", seq2seq, num_encoder_layers=2, num_decoder_layers=2,
              num_encoder_attention_heads=4, num_decoder_attention_heads=4),
        entry("FSMTForConditionalGeneration", lambda: seq2seq(16, 16), src_vocab_size=99, tgt_vocab_size=99,
              langs=["en", "de"]),
        entry("MvpForConditionalGeneration", seq2seq),
        entry("NllbMoeForConditionalGeneration", seq2seq, num_experts=4, expert_capacity=64, encoder_sparse_step=2,
              decoder_sparse_step=2),
        entry("T5GemmaForConditionalGeneration", seq2seq, encoder=GEMMA, decoder=GEMMA, vocab_size=99),
        Entry("EncoderDecoderModel Bert", encoder_decoder, seq2seq, own_loss=True),
        entry("WhisperForConditionalGeneration", lambda: mel(32), num_mel_bins=16, max_source_positions=16,
              max_target_positions=32),
        entry("WhisperForAudioClassification", lambda: {"input_features": noise(BATCH, 16, 32),
              "labels": torch.tensor([0, 1, 1, 0])}, num_mel_bins=16, max_source_positions=16, encoder_layers=4),
        entry("Speech2TextForConditionalGeneration", speech, input_feat_per_channel=16, input_channels=1,
              conv_channels=16, max_source_positions=64, max_target_positions=32),
        entry("MoonshineForConditionalGeneration", lambda: {"input_values": noise(BATCH, 2000), "labels": ids(BATCH,
              8)}, encoder_num_hidden_layers=2, decoder_num_hidden_layers=2, encoder_num_attention_heads=4,
              decoder_num_attention_heads=4),
        entry("SpeechT5ForSpeechToText", lambda: {"input_values": noise(BATCH, 2000), "labels": ids(BATCH, 8)},
              hidden_size=32, conv_dim=[16] * 3, conv_stride=[5, 4, 4], conv_kernel=[10, 4, 4], mask_time_prob=0.0,
              num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, apply_spec_augment=False),
        entry("TimeSeriesTransformerForPrediction", series, **time),
        entry("InformerForPrediction", series, **time),
        entry("AutoformerForPrediction", series, **time, label_length=4, moving_average=3, autocorrelation_factor=1),
        entry("PatchTSTForPrediction", lambda: channels(32, "future_values", 8, 3), num_input_channels=3,
              context_length=32, prediction_length=8, patch_length=4, patch_stride=4),
        entry("PatchTSTForClassification", lambda: {"past_values": noise(BATCH, 32, 3),
              "target_values": torch.tensor([0, 1, 1, 0])}, num_input_channels=3, context_length=32, patch_length=4,
              patch_stride=4, num_targets=2),
        entry("PatchTSMixerForPrediction", lambda: channels(32, "future_values", 8, 3), num_input_channels=3,
              context_length=32, prediction_length=8, patch_length=4, patch_stride=4, num_layers=4),
        entry("TimesFmModelForPrediction", lambda: {"past_values": noise(BATCH, 64), "freq": torch.zeros(BATCH,
              1).long(), "future_values": noise(BATCH, 16, seed=5)}, patch_length=16, horizon_length=16,
              context_length=64),
    ]  # fmt: skip
    return found
