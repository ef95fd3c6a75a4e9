"""Audio and multimodal models of transformers."""

# ruff: noqa: C408 (settings are written as keyword arguments)
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.zoo_models import BATCH, Entry, ids, mask, noise
from benchmarks.zoo_models.transformers_common import entry, image, tokens

TEXT = dict(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
            max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            attention_dropout=0.0)  # fmt: skip
VISION = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=32,
              patch_size=8, num_channels=3)  # fmt: skip
IMAGE_TOKEN = 4  # below the ids of ``ids``, so that there are as many as placed by hand


def wave(length: int = 2000, labels: str | None = None) -> dict[str, Tensor]:
    batch = {"input_values": noise(BATCH, length)}
    if labels == "ctc":
        batch["labels"] = ids(BATCH, 4, vocab=30)
    if labels == "class":
        batch["labels"] = torch.tensor([0, 1, 1, 0])
    return batch


def text_image(labels: bool = False, **more: Any) -> dict[str, Any]:
    batch = {**tokens(), **image()}
    batch["input_ids"][:, -1] = 2  # CLIP reads the end of the sequence
    batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    return {**batch, **({"labels": ids(BATCH, 16)} if labels else {}), **more}


def image_in_text(count: int, length: int = 24, **more: Any) -> dict[str, Any]:
    """Tokens that have ``count`` image tokens at their beginning, the image and labels."""
    batch = {"input_ids": ids(BATCH, length), "attention_mask": torch.ones(BATCH, length, dtype=torch.long)}
    batch["labels"] = batch["input_ids"].clone()
    batch["input_ids"][:, 1 : 1 + count] = IMAGE_TOKEN
    return {**batch, **image(), **more}


def qwen_image() -> dict[str, Any]:
    """Patches of all images in one dimension, sixteen per sample, which are merged to four tokens."""
    batch = image_in_text(4)
    batch["pixel_values"] = noise(BATCH * 16, 3 * 2 * 8 * 8)
    batch["image_grid_thw"] = torch.tensor([[1, 4, 4]] * BATCH)
    batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE_TOKEN).long()
    return batch


def entries() -> list[Entry]:
    conv = dict(conv_dim=[16, 16, 16], conv_stride=[5, 4, 4], conv_kernel=[10, 4, 4], num_feat_extract_layers=3,
                num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, mask_time_prob=0.0, mask_feature_prob=0.0,
                apply_spec_augment=False, ctc_loss_reduction="mean")  # fmt: skip
    found = []
    for family in ("Wav2Vec2", "Hubert", "WavLM", "UniSpeech", "UniSpeechSat", "Data2VecAudio", "SEW",
                   "Wav2Vec2Conformer"):  # fmt: skip
        extra: dict[str, Any] = dict(conv)
        if family == "SEW":
            extra |= dict(squeeze_factor=2)
        if family == "Data2VecAudio":
            extra |= dict(num_conv_pos_embeddings=2, conv_pos_kernel_size=3)
        found.append(entry(f"{family}ForCTC", lambda: wave(labels="ctc"), **extra))
        found.append(entry(f"{family}ForSequenceClassification", lambda: wave(labels="class"), **extra))
    pair = dict(text_config=TEXT, vision_config=VISION)
    llava = dict(text_config={"model_type": "llama", **TEXT}, vision_config={"model_type": "clip_vision_model",
                 **VISION, "projection_dim": 32}, image_token_index=IMAGE_TOKEN,
                 image_token_id=IMAGE_TOKEN)  # fmt: skip
    siglip = {"model_type": "siglip_vision_model", **VISION, "projection_dim": 32, "vision_use_head": False}
    gemma_text = {"model_type": "gemma", **TEXT, "num_key_value_heads": 2, "head_dim": 8}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    qwen_text = {**TEXT, "num_key_value_heads": 2, "rope_parameters": rope}
    found += [
        entry("Wav2Vec2Model", wave, **conv),
        entry("SEWDForCTC", lambda: wave(labels="ctc"), **conv, squeeze_factor=2, position_buckets=16,
              max_position_embeddings=64),
        entry("Wav2Vec2ForXVector", lambda: wave(labels="class"), **conv, tdnn_dim=[16, 16], tdnn_kernel=[3, 1],
              tdnn_dilation=[1, 1], xvector_output_dim=16),
        entry("Wav2Vec2BertForCTC", lambda: {"input_features": noise(BATCH, 24, 16), "labels": ids(BATCH, 4, vocab=30)},
              feature_projection_input_dim=16, position_embeddings_type="relative", mask_time_prob=0.0),
        entry("ASTForAudioClassification", lambda: {"input_values": noise(BATCH, 32, 16),
              "labels": torch.tensor([0, 1, 1, 0])}, max_length=32, num_mel_bins=16, frequency_stride=8, time_stride=8),
        entry("EncodecModel", lambda: {"input_values": noise(BATCH, 1, 640)}, num_filters=4, hidden_size=16,
              num_lstm_layers=1, codebook_size=16, codebook_dim=16, upsampling_ratios=[4, 4], normalize=False,
              eval_mode=True),
        entry("DacModel", lambda: {"input_values": noise(BATCH, 1, 640)}, encoder_hidden_size=8, decoder_hidden_size=16,
              downsampling_ratios=[2, 4], upsampling_ratios=[4, 2], n_codebooks=2, codebook_size=16, hidden_size=...),
        entry("VitsModel", lambda: {"input_ids": ids(BATCH, 8, vocab=38)}, eval_mode=True),
        entry("ClapModel", lambda: {**tokens(), "input_features": noise(BATCH, 1, 64, 16)},
              audio_config=dict(num_mel_bins=16, spec_size=32, patch_size=4, patch_stride=[4, 4], depths=[1, 1],
              num_attention_heads=[2, 2], patch_embeds_hidden_size=16, hidden_size=32, window_size=4,
              num_hidden_layers=2, enable_fusion=False), text_config=TEXT, projection_dim=16),
        entry("CLIPModel", text_image, **pair, projection_dim=16),
        entry("CLIPModel", lambda: text_image(return_loss=True), label=" loss", **pair, projection_dim=16),
        entry("CLIPTextModel", tokens),
        entry("CLIPVisionModel", image),
        entry("CLIPForImageClassification", lambda: {**image(), "labels": torch.tensor([0, 1, 1, 0])}, **pair),
        entry("ChineseCLIPModel", text_image, **pair, projection_dim=16),
        entry("AltCLIPModel", text_image, text_config={**TEXT, "project_dim": 16}, vision_config=VISION,
              projection_dim=16),
        entry("CLIPSegForImageSegmentation", lambda: {**text_image()}, **pair, projection_dim=16, reduce_dim=8,
              extract_layers=[0, 1], decoder_num_attention_heads=2),
        entry("XCLIPModel", lambda: {"input_ids": text_image()["input_ids"], "pixel_values": noise(BATCH, 2, 3, 32,
              32)}, text_config=TEXT, vision_config={**VISION, "num_frames": 2, "mit_hidden_size": 16,
              "mit_num_attention_heads": 2, "mit_intermediate_size": 32}, projection_dim=16),
        entry("SiglipModel", text_image, **pair),
        entry("SiglipForImageClassification", lambda: {**image(), "labels": torch.tensor([0, 1, 1, 0])}, **pair),
        entry("Siglip2Model", lambda: {**tokens(), "pixel_values": noise(BATCH, 16, 192), "pixel_attention_mask":
              torch.ones(BATCH, 16), "spatial_shapes": torch.tensor([[4, 4]] * BATCH)}, text_config=TEXT,
              vision_config={**VISION, "num_patches": 16}),
        entry("AlignModel", text_image, text_config=TEXT, vision_config=dict(image_size=32, hidden_dim=80,
              width_coefficient=0.25, depth_coefficient=0.5), projection_dim=80),
        entry("GroupViTModel", text_image, text_config=TEXT, vision_config={**VISION, "depths": [1, 1, 1],
              "num_group_tokens": [8, 4, 0], "num_output_groups": [8, 4, 4]}, projection_dim=16,
              projection_intermediate_dim=16),
        entry("BlipForConditionalGeneration", lambda: text_image(labels=True), **pair, projection_dim=16),
        entry("BlipForImageTextRetrieval", text_image, text_config={**TEXT, "encoder_hidden_size": 32},
              vision_config=VISION, projection_dim=16, image_text_hidden_size=16),
        entry("BlipForQuestionAnswering", lambda: text_image(labels=True), **pair, projection_dim=16),
        entry("Blip2ForConditionalGeneration", lambda: image_in_text(6), vision_config=VISION, num_query_tokens=6,
              qformer_config={**TEXT, "encoder_hidden_size": 32}, text_config={"model_type": "opt", **TEXT,
              "ffn_dim": 64, "word_embed_proj_dim": 32}, image_token_index=IMAGE_TOKEN, image_token_id=IMAGE_TOKEN),
        entry("InstructBlipForConditionalGeneration", lambda: image_in_text(6, qformer_input_ids=ids(BATCH, 8)),
              vision_config=VISION, qformer_config={**TEXT, "encoder_hidden_size": 32},
              text_config={"model_type": "opt", **TEXT, "ffn_dim": 64, "word_embed_proj_dim": 32}, num_query_tokens=6,
              image_token_index=IMAGE_TOKEN),
        entry("LlavaForConditionalGeneration", lambda: image_in_text(16), **llava, vision_feature_layer=-1),
        entry("VipLlavaForConditionalGeneration", lambda: image_in_text(16), **llava, vision_feature_layers=[0, 1]),
        entry("LlavaNextForConditionalGeneration", lambda: image_in_text(36, 44, image_sizes=torch.tensor([[32,
              32]] * BATCH), pixel_values=noise(BATCH, 2, 3, 32, 32)), **llava, image_grid_pinpoints=[[32, 32]],
              vision_feature_layer=-1),
        entry("PaliGemmaForConditionalGeneration", lambda: image_in_text(16, token_type_ids=mask(24)),
              text_config=gemma_text, vision_config=siglip, image_token_index=IMAGE_TOKEN, image_token_id=IMAGE_TOKEN,
              projection_dim=32),
        entry("Gemma3ForConditionalGeneration", lambda: image_in_text(4,
              token_type_ids=(torch.arange(24) < 5).long().repeat(4, 1)), text_config={**gemma_text,
              "model_type": "gemma3_text"}, vision_config=siglip, mm_tokens_per_image=4,
              image_token_index=IMAGE_TOKEN, image_token_id=IMAGE_TOKEN),
        entry("Mistral3ForConditionalGeneration", lambda: image_in_text(4, image_sizes=torch.tensor([[32,
              32]] * BATCH)), text_config={"model_type": "mistral", **TEXT, "num_key_value_heads": 2, "head_dim": 8},
              vision_config={"model_type": "pixtral", **VISION}, spatial_merge_size=2, image_token_index=IMAGE_TOKEN,
              image_token_id=IMAGE_TOKEN),
        entry("InternVLForConditionalGeneration", lambda: image_in_text(4), text_config={"model_type": "qwen2", **TEXT,
              "num_key_value_heads": 2}, vision_config={**VISION, "image_size": [32, 32], "patch_size": [8, 8]},
              downsample_ratio=0.5, image_token_id=IMAGE_TOKEN),
        entry("AyaVisionForConditionalGeneration", lambda: image_in_text(4), text_config={"model_type": "cohere2",
              **TEXT, "num_key_value_heads": 2, "head_dim": 8, "layer_types": None}, vision_config=siglip,
              downsample_factor=2, image_token_index=IMAGE_TOKEN, image_token_id=IMAGE_TOKEN,
              adapter_layer_norm_eps=1e-6),
        entry("Idefics2ForConditionalGeneration", lambda: {**image_in_text(4), "pixel_values": noise(BATCH, 1, 3, 32,
              32)}, text_config={"model_type": "mistral", **TEXT, "num_key_value_heads": 2}, vision_config=VISION,
              perceiver_config=dict(resampler_n_latents=4, resampler_depth=1, resampler_n_heads=2,
              num_key_value_heads=1, resampler_head_dim=8), image_token_id=IMAGE_TOKEN),
        entry("Idefics3ForConditionalGeneration", lambda: {**image_in_text(4), "pixel_values": noise(BATCH, 1, 3, 32,
              32)}, text_config={"model_type": "llama", **TEXT}, vision_config=VISION, scale_factor=2,
              image_token_id=IMAGE_TOKEN),
        entry("SmolVLMForConditionalGeneration", lambda: {**image_in_text(4), "pixel_values": noise(BATCH, 1, 3, 32,
              32)}, text_config={"model_type": "llama", **TEXT}, vision_config=VISION, scale_factor=2,
              image_token_id=IMAGE_TOKEN),
        entry("IdeficsForVisionText2Text", lambda: {**tokens(), "pixel_values": noise(BATCH, 1, 3, 32, 32),
              "image_attention_mask": torch.ones(BATCH, 16, 1).long(), "labels": ids(BATCH, 16)},
              vision_config=dict(embed_dim=32, image_size=32, patch_size=8, num_hidden_layers=2,
              num_attention_heads=4, intermediate_size=64), cross_layer_interval=2, use_resampler=False,
              additional_vocab_size=0),
        entry("Qwen2VLForConditionalGeneration", qwen_image, text_config={"model_type": "qwen2_vl_text", **qwen_text},
              vision_config=dict(depth=2, embed_dim=32, hidden_size=32, num_heads=4, mlp_ratio=2, patch_size=8,
              spatial_merge_size=2, temporal_patch_size=2), image_token_id=IMAGE_TOKEN, vision_start_token_id=3),
        entry("Qwen2_5_VLForConditionalGeneration", qwen_image, text_config={"model_type": "qwen2_5_vl_text",
              **qwen_text}, vision_config=dict(depth=2, hidden_size=32, intermediate_size=64, num_heads=4,
              patch_size=8, out_hidden_size=32, spatial_merge_size=2, temporal_patch_size=2,
              fullatt_block_indexes=[1], window_size=32), image_token_id=IMAGE_TOKEN, vision_start_token_id=3),
        entry("Qwen2VLForConditionalGeneration", lambda: {**tokens(), "labels": ids(BATCH, 16)}, label=" text only",
              text_config={"model_type": "qwen2_vl_text", **qwen_text, "num_hidden_layers": 4},
              vision_config=dict(depth=2, embed_dim=32, hidden_size=32, num_heads=4, mlp_ratio=2, patch_size=8),
              image_token_id=IMAGE_TOKEN),
        entry("MllamaForCausalLM", lambda: {**tokens(), "labels": ids(BATCH, 16)}, cross_attention_layers=[]),
        entry("FuyuForCausalLM", lambda: {**tokens(), "labels": ids(BATCH, 16)},
              text_config={"model_type": "persimmon", **TEXT, "num_hidden_layers": 4}),
        entry("ChameleonForConditionalGeneration", lambda: {**tokens(), "labels": ids(BATCH, 16)}, num_hidden_layers=4,
              vq_config=dict(embed_dim=8, num_embeddings=8, latent_channels=8, resolution=32, base_channels=32,
              channel_multiplier=[1, 1], num_res_blocks=1), vocabulary_map={"<image>": 4}),
        entry("GitForCausalLM", lambda: text_image(labels=True), vision_config=VISION),
        entry("ViltForQuestionAnswering", lambda: {**tokens(), **image(), "labels": noise(BATCH, 2, seed=5).sigmoid()},
              max_image_length=-1),
        entry("FlavaModel", text_image, text_config=TEXT, image_config=VISION, multimodal_config=dict(hidden_size=32,
              num_hidden_layers=2, num_attention_heads=4, intermediate_size=64), hidden_size=32, projection_dim=16),
        entry("VisualBertForQuestionAnswering", lambda: {**tokens(), "visual_embeds": noise(BATCH, 4, 16),
              "labels": noise(BATCH, 2, seed=5).sigmoid()}, visual_embedding_dim=16),
        entry("LxmertForQuestionAnswering", lambda: {**tokens(), "visual_feats": noise(BATCH, 4, 16),
              "visual_pos": noise(BATCH, 4, 4), "labels": torch.tensor([0, 1, 1, 0])}, visual_feat_dim=16, l_layers=2,
              x_layers=2, r_layers=2, num_qa_labels=2),
        entry("BridgeTowerModel", lambda: {**tokens(), **image(), "pixel_mask": torch.ones(BATCH, 32, 32).long()},
              text_config={**TEXT, "hidden_size": 64}, vision_config={**VISION, "hidden_size": 64},
              num_hidden_layers=2, hidden_size=64),
        entry("LayoutLMv3ForSequenceClassification", lambda: {**tokens(), **image(), "bbox": torch.ones(BATCH, 16,
              4).long(), "labels": torch.tensor([0, 1, 1, 0])}, input_size=32, max_2d_position_embeddings=64,
              coordinate_size=6, shape_size=4),
        entry("Pix2StructForConditionalGeneration", lambda: {"flattened_patches": noise(BATCH, 8, 50).abs() * 3,
              "attention_mask": torch.ones(BATCH, 8).long(), "labels": ids(BATCH, 8)}, text_config=dict(vocab_size=99,
              hidden_size=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, pad_token_id=0, decoder_start_token_id=0),
              vision_config=dict(hidden_size=32, patch_embed_hidden_size=48, d_ff=64, d_kv=8, num_hidden_layers=2,
              num_attention_heads=4)),
        entry("OwlViTForObjectDetection", lambda: {"input_ids": ids(BATCH, 16), **image()}, **pair, projection_dim=32),
        entry("SamModel", lambda: {"pixel_values": noise(BATCH, 3, 32, 32), "input_points": torch.full((BATCH, 1, 1,
              2), 9.0)}, vision_config={**VISION, "mlp_dim": 64, "output_channels": 256, "global_attn_indexes": [1],
              "window_size": 2}, prompt_encoder_config=dict(hidden_size=256, image_size=32, patch_size=8,
              mask_input_channels=4), mask_decoder_config=dict(hidden_size=256, mlp_dim=32, num_attention_heads=2,
              iou_head_hidden_dim=16, iou_head_depth=2)),
        entry("MusicgenForCausalLM", lambda: {"input_ids": ids(BATCH * 2, 8)}, num_codebooks=2, ffn_dim=64),
        entry("CsmBackboneModel", lambda: {"inputs_embeds": noise(BATCH, 8, 32)}),
        entry("DecisionTransformerModel", lambda: {"states": noise(BATCH, 6, 5), "actions": noise(BATCH, 6, 2),
              "rewards": noise(BATCH, 6, 1), "returns_to_go": noise(BATCH, 6, 1, seed=4),
              "timesteps": torch.arange(6).repeat(4, 1), "attention_mask": torch.ones(BATCH, 6)}, state_dim=5,
              act_dim=2, n_layer=4, n_head=4),
    ]  # fmt: skip
    return found
