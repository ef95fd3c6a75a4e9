"""Denoisers and autoencoders of diffusers."""

# ruff: noqa: C408 (settings are written as keyword arguments)
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import penstock as ps
from benchmarks.zoo_models import BATCH, Entry, ids, noise


def steps() -> Tensor:
    return torch.tensor([10, 200, 500, 900])


def denoiser(*shape: int, name: str = "sample", text: tuple[int, int] | None = None, **more: Any) -> dict[str, Any]:
    """Noisy samples, their time steps, and the hidden states of a text encoder."""
    batch = {name: noise(BATCH, *shape), "timestep": steps(), **more}
    return batch if text is None else {**batch, "encoder_hidden_states": noise(BATCH, *text, seed=7)}


def entries() -> list[Entry]:
    import diffusers

    def entry(name: str, inputs: Callable[[], Any], *, label: str = "", **settings: Any) -> Entry:
        return Entry(name + label, lambda: getattr(diffusers, name)(**settings), inputs)

    small = dict(block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8, sample_size=16)
    down, up = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
    conditional: dict[str, Any] = dict(**small, down_block_types=down, up_block_types=up, cross_attention_dim=16,
                                       attention_head_dim=4)  # fmt: skip
    vae = dict(block_out_channels=(16, 32), down_block_types=("DownEncoderBlock2D",) * 2,
               up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=8, latent_channels=4)  # fmt: skip
    dit = dict(num_attention_heads=4, attention_head_dim=8, num_layers=4, in_channels=4, sample_size=8, patch_size=2)
    flux_ids = lambda count: ps.Broadcast(torch.arange(count * 3).float().view(count, 3) % 5)  # noqa: E731
    image = lambda: {"sample": noise(BATCH, 3, 16, 16)}  # noqa: E731
    found = [
        entry("UNet2DModel", lambda: denoiser(3, 16, 16), **small, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
              up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=8),
        entry("UNet2DModel", lambda: denoiser(3, 16, 16, class_labels=torch.tensor([0, 1, 2, 3])), label=" classes",
              **small, down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"),
              num_class_embeds=10),
        entry("UNet2DConditionModel", lambda: denoiser(4, 16, 16, text=(6, 16)), **conditional),
        entry("UNet2DConditionModel", lambda: {**denoiser(4, 16, 16, text=(6, 16)), "timestep": 500},
              label=" one timestep", **conditional),
        entry("UNet2DConditionModel", lambda: denoiser(4, 16, 16, text=(6, 16), added_cond_kwargs={
              "text_embeds": noise(BATCH, 8), "time_ids": noise(BATCH, 6)}), label=" SDXL", **conditional,
              addition_embed_type="text_time", addition_time_embed_dim=4, projection_class_embeddings_input_dim=32),
        entry("UNet1DModel", lambda: denoiser(4, 16), sample_size=16, in_channels=4, out_channels=4,
              block_out_channels=(16, 32), down_block_types=("DownResnetBlock1D", "DownResnetBlock1D"),
              up_block_types=("UpResnetBlock1D",), use_timestep_embedding=True, time_embedding_type="positional",
              mid_block_type="MidResTemporalBlock1D", out_block_type="OutConv1DBlock", flip_sin_to_cos=False,
              freq_shift=1, act_fn="swish", layers_per_block=1),
        entry("UNet3DConditionModel", lambda: denoiser(4, 2, 16, 16, text=(6, 16)), block_out_channels=(16, 32),
              down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"), up_block_types=("UpBlock3D",
              "CrossAttnUpBlock3D"), cross_attention_dim=16, attention_head_dim=8, norm_num_groups=8,
              layers_per_block=1),
        entry("ControlNetModel", lambda: denoiser(4, 16, 16, text=(6, 16), controlnet_cond=noise(BATCH, 3, 128, 128)),
              block_out_channels=(16, 32), down_block_types=down, cross_attention_dim=16, attention_head_dim=4,
              norm_num_groups=8, layers_per_block=1, conditioning_embedding_out_channels=(8, 8, 8, 8)),
        entry("DiTTransformer2DModel", lambda: {"hidden_states": noise(BATCH, 4, 8, 8), "timestep": steps(),
              "class_labels": torch.tensor([0, 1, 2, 3])}, **dit, num_embeds_ada_norm=1000, out_channels=8),
        entry("PixArtTransformer2DModel", lambda: denoiser(4, 8, 8, name="hidden_states", text=(6, 16),
              added_cond_kwargs={"resolution": None, "aspect_ratio": None}), **dit, out_channels=8,
              cross_attention_dim=32, caption_channels=16, use_additional_conditions=False),
        entry("SD3Transformer2DModel", lambda: denoiser(4, 8, 8, name="hidden_states", text=(6, 16),
              pooled_projections=noise(BATCH, 24)), **dit, joint_attention_dim=16, caption_projection_dim=32,
              pooled_projection_dim=24, out_channels=4, pos_embed_max_size=16),
        entry("FluxTransformer2DModel", lambda: {"hidden_states": noise(BATCH, 16, 4),
              "encoder_hidden_states": noise(BATCH, 6, 16), "pooled_projections": noise(BATCH, 24),
              "timestep": steps() / 1000, "img_ids": flux_ids(16), "txt_ids": flux_ids(6)}, in_channels=4,
              num_layers=2, num_single_layers=2, attention_head_dim=8, num_attention_heads=4, joint_attention_dim=16,
              pooled_projection_dim=24, axes_dims_rope=(2, 2, 4)),
        entry("FluxTransformer2DModel", lambda: {"hidden_states": noise(BATCH, 16, 4),
              "encoder_hidden_states": noise(BATCH, 6, 16), "pooled_projections": noise(BATCH, 24),
              "timestep": steps() / 1000, "img_ids": flux_ids(16), "txt_ids": flux_ids(6),
              "guidance": torch.ones(BATCH)}, label=" guidance", in_channels=4, num_layers=2, num_single_layers=2,
              attention_head_dim=8, num_attention_heads=4, joint_attention_dim=16, pooled_projection_dim=24,
              axes_dims_rope=(2, 2, 4), guidance_embeds=True),
        entry("Transformer2DModel", lambda: {"hidden_states": noise(BATCH, 32, 8, 8), "encoder_hidden_states":
              noise(BATCH, 6, 16)}, num_attention_heads=4, attention_head_dim=8, in_channels=32, num_layers=4,
              cross_attention_dim=16, norm_num_groups=8),
        entry("HunyuanDiT2DModel", lambda: {"hidden_states": noise(BATCH, 4, 8, 8), "timestep": steps().float(),
              "encoder_hidden_states": noise(BATCH, 6, 16), "encoder_hidden_states_t5": noise(BATCH, 5, 24),
              "text_embedding_mask": torch.ones(BATCH, 6), "text_embedding_mask_t5": torch.ones(BATCH, 5),
              "image_meta_size": noise(BATCH, 6), "style": torch.zeros(BATCH).long(),
              "image_rotary_emb": [ps.Broadcast(noise(16, 8)), ps.Broadcast(noise(16, 8))]}, num_attention_heads=4,
              attention_head_dim=8, in_channels=4, patch_size=2, hidden_size=32, sample_size=8, num_layers=4,
              cross_attention_dim=16, cross_attention_dim_t5=24, pooled_projection_dim=16, text_len=6, text_len_t5=5),
        entry("LuminaNextDiT2DModel", lambda: {"hidden_states": noise(BATCH, 4, 8, 8), "timestep": steps() / 1000,
              "encoder_hidden_states": noise(BATCH, 6, 16), "encoder_mask": torch.ones(BATCH, 6).bool(),
              "image_rotary_emb": ps.Broadcast(torch.polar(torch.ones(384, 384, 4), noise(384, 384, 4))),
              "cross_attention_kwargs": {}}, sample_size=8, patch_size=2, in_channels=4, hidden_size=32, num_layers=4,
              num_attention_heads=4, num_kv_heads=2, cross_attention_dim=16, multiple_of=16),
        entry("SanaTransformer2DModel", lambda: denoiser(4, 8, 8, name="hidden_states", text=(6, 16)), in_channels=4,
              out_channels=4, num_attention_heads=4, attention_head_dim=8, num_layers=4, num_cross_attention_heads=4,
              cross_attention_head_dim=8, cross_attention_dim=32, caption_channels=16, sample_size=8, patch_size=1),
        entry("AuraFlowTransformer2DModel", lambda: denoiser(4, 8, 8, name="hidden_states", text=(6, 16)),
              sample_size=8, patch_size=2, in_channels=4, num_mmdit_layers=2, num_single_dit_layers=2,
              attention_head_dim=8, num_attention_heads=4, joint_attention_dim=16, caption_projection_dim=32,
              out_channels=4, pos_embed_max_size=16),
        entry("StableAudioDiTModel", lambda: denoiser(8, 16, name="hidden_states", text=(6, 16),
              global_hidden_states= noise(BATCH, 1, 16)), sample_size=16, in_channels=8, num_layers=4,
              attention_head_dim=8, num_attention_heads=4, num_key_value_attention_heads=2, out_channels=8,
              cross_attention_dim=16, time_proj_dim=16, global_states_input_dim=16, cross_attention_input_dim=16),
        entry("LatteTransformer3DModel", lambda: denoiser(4, 2, 8, 8, name="hidden_states", text=(6, 16)),
              num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=2,
              cross_attention_dim=32, sample_size=8, patch_size=2, caption_channels=16, video_length=2,
              norm_type="ada_norm_single"),
        entry("CogVideoXTransformer3DModel", lambda: denoiser(2, 4, 8, 8, name="hidden_states", text=(6, 16)),
              num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=4, time_embed_dim=8,
              text_embed_dim=16, num_layers=4, sample_width=8, sample_height=8, sample_frames=5, patch_size=2,
              max_text_seq_length=6),
        entry("LTXVideoTransformer3DModel", lambda: {"hidden_states": noise(BATCH, 32, 8), "encoder_hidden_states":
              noise(BATCH, 6, 16), "timestep": steps(), "encoder_attention_mask": torch.ones(BATCH, 6), "num_frames": 2,
              "height": 4, "width": 4}, in_channels=8, out_channels=8, num_attention_heads=4, attention_head_dim=8,
              cross_attention_dim=32, num_layers=4, caption_channels=16),
        entry("WanTransformer3DModel", lambda: denoiser(4, 2, 8, 8, name="hidden_states", text=(6, 16)),
              patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4,
              text_dim=16, freq_dim=32, ffn_dim=32, num_layers=4, rope_max_seq_len=32),
        entry("MochiTransformer3DModel", lambda: denoiser(4, 2, 8, 8, name="hidden_states", text=(6, 16),
              encoder_attention_mask=torch.ones(BATCH, 6).bool()), patch_size=2, num_attention_heads=2,
              attention_head_dim=8, num_layers=4, pooled_projection_dim=16, in_channels=4, text_embed_dim=16,
              time_embed_dim=8, max_sequence_length=6),
        entry("HunyuanVideoTransformer3DModel", lambda: denoiser(4, 1, 8, 8, name="hidden_states", text=(6, 16),
              encoder_attention_mask=torch.ones(BATCH, 6).bool(), pooled_projections=noise(BATCH, 8),
              guidance=torch.full((BATCH,), 6.0)), in_channels=4, out_channels=4, num_attention_heads=2,
              attention_head_dim=8, num_layers=2, num_single_layers=2, num_refiner_layers=1, patch_size=2,
              patch_size_t=1, guidance_embeds=True, text_embed_dim=16, pooled_projection_dim=8, rope_axes_dim=(2, 2,
              4)),
        entry("PriorTransformer", lambda: {"hidden_states": noise(BATCH, 8), "timestep": steps(),
              "proj_embedding": noise(BATCH, 8, seed=3), "encoder_hidden_states": noise(BATCH, 6, 8)},
              num_attention_heads=2, attention_head_dim=8, num_layers=4, embedding_dim=8, num_embeddings=6,
              additional_embeddings=4),
        entry("AutoencoderKL", image, **vae),
        entry("AutoencoderTiny", image, encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8),
              num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1), upsampling_scaling_factor=2),
        entry("AsymmetricAutoencoderKL", image, down_block_types=("DownEncoderBlock2D",) * 2,
              down_block_out_channels=(16, 32), up_block_types=("UpDecoderBlock2D",) * 2, up_block_out_channels=(16,
              32), norm_num_groups=8),
        entry("AutoencoderDC", image, latent_channels=4, attention_head_dim=4, encoder_block_out_channels=(8, 16),
              decoder_block_out_channels=(8, 16), encoder_block_types="ResBlock", decoder_block_types="ResBlock",
              encoder_layers_per_block=(1, 1), decoder_layers_per_block=(1, 1), encoder_qkv_multiscales=((), ()),
              decoder_qkv_multiscales=((), ()), decoder_norm_types="rms_norm", decoder_act_fns="silu"),
        entry("AutoencoderKLTemporalDecoder", lambda: {"sample": noise(BATCH, 3, 16, 16), "num_frames": 2},
              block_out_channels= (32, 32), down_block_types=("DownEncoderBlock2D",) * 2, latent_channels=4),
        entry("AutoencoderKLCogVideoX", lambda: {"sample": noise(BATCH, 3, 5, 16, 16)}, block_out_channels=(8, 8, 8,
              8), down_block_types=("CogVideoXDownBlock3D",) * 4, up_block_types=("CogVideoXUpBlock3D",) * 4,
              latent_channels=4, layers_per_block=1, norm_num_groups=2, temporal_compression_ratio=4),
        entry("AutoencoderOobleck", lambda: {"sample": noise(BATCH, 2, 64)}, encoder_hidden_size=8,
              downsampling_ratios=[2, 4], decoder_channels=8, decoder_input_channels=4, channel_multiples=[1, 2]),
        entry("VQModel", image, block_out_channels=(16, 32), down_block_types=("DownEncoderBlock2D",) * 2,
              up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=8, latent_channels=3, num_vq_embeddings=16),
        entry("UVit2DModel", lambda: {"input_ids": ids(BATCH, 4, 4, vocab=20),
              "encoder_hidden_states": noise(BATCH, 6, 16), "pooled_text_emb": noise(BATCH, 16),
              "micro_conds": noise(BATCH, 5).abs() * 9}, hidden_size=32, cond_embed_dim=16, encoder_hidden_size=16,
              num_hidden_layers=4, num_attention_heads=4, intermediate_size=64, vocab_size=24, codebook_size=20,
              micro_cond_encode_dim=2, micro_cond_embed_dim=10, block_out_channels=32, in_channels=16, sample_size=4,
              use_bias=False, block_num_heads=4),
    ]  # fmt: skip
    return found
