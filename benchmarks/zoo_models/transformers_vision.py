"""Vision models of transformers: classification, backbones, detection, segmentation, depth."""

# ruff: noqa: C408 (settings are written as keyword arguments)
from __future__ import annotations

from typing import Any

import torch

from benchmarks.zoo_models import BATCH, Entry, ids, noise
from benchmarks.zoo_models.transformers_common import entry, image, image_class

BACKBONE = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1],
            "layer_type": "basic", "out_features": ["stage2", "stage3", "stage4"]}  # fmt: skip


def boxes() -> dict[str, Any]:
    """One object per image. The labels are a list of dicts, as the image processors make them."""
    where = torch.tensor([[0.5, 0.5, 0.4, 0.4]])
    labels = [{"class_labels": torch.tensor([i % 2]), "boxes": where} for i in range(BATCH)]
    return {**image(64), "labels": labels}


def segmentation(size: int = 32) -> dict[str, Any]:
    labels = torch.randint(0, 2, (BATCH, size, size), generator=torch.Generator().manual_seed(4))
    return {**image(size), "labels": labels}


def entries() -> list[Entry]:
    stages = dict(hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1])
    swin = dict(num_hidden_layers=..., num_attention_heads=..., hidden_size=..., embed_dim=8, depths=[1, 1, 2],
                num_heads=[2, 2, 4], window_size=4, patch_size=2)  # fmt: skip
    four = lambda: image_class(64)  # noqa: E731
    detr = dict(use_timm_backbone=False, backbone_config=BACKBONE, backbone=None, num_queries=6,
                use_pretrained_backbone=False)  # fmt: skip
    found = [
        entry("ViTForImageClassification", image_class),
        entry("ViTModel", image),
        entry("ViTForMaskedImageModeling", image, encoder_stride=8),
        entry("ViTMSNForImageClassification", image_class),
        entry("DeiTForImageClassification", image_class),
        entry("DeiTForImageClassificationWithTeacher", image),
        entry("BeitForImageClassification", image_class, use_relative_position_bias=True, layer_scale_init_value=0.1),
        entry("BeitForImageClassification", image_class, label=" shared bias", use_shared_relative_position_bias=True),
        entry("Data2VecVisionForImageClassification", image_class),
        entry("Dinov2ForImageClassification", image_class),
        entry("Dinov2Model", image),
        entry("Dinov2Backbone", image, out_features=["stage2", "stage4"]),
        entry("Dinov2WithRegistersForImageClassification", image_class),
        entry("DINOv3ViTModel", image),
        entry("VitDetBackbone", image, out_features=["stage2", "stage4"], window_block_indices=[0, 2], window_size=2),
        entry("IJepaModel", image),
        entry("SwinForImageClassification", image_class, **swin),
        entry("SwinBackbone", image, **swin, out_features=["stage1", "stage2"]),
        entry("SwinForMaskedImageModeling", image, **swin, encoder_stride=8),
        entry("Swinv2ForImageClassification", image_class, **swin),
        entry("Swin2SRForImageSuperResolution", image, **{**swin, "depths": [2, 2], "num_heads": [2, 2],
              "patch_size": 1}, upscale=2, upsampler="pixelshuffle"),
        entry("DonutSwinModel", image, **swin),
        entry("HieraForImageClassification", four, embed_dim=8, depths=[1, 1, 2, 1], image_size=[64, 64],
              hidden_size=..., patch_size=[7, 7], patch_stride=[4, 4], patch_padding=[3, 3], masked_unit_size=[8, 8],
              query_stride=[2, 2], num_query_pool=2, num_heads=[1, 2, 2, 4]),
        entry("ConvNextForImageClassification", four, **stages),
        entry("ConvNextBackbone", lambda: image(64), **stages, out_features=["stage2", "stage4"]),
        entry("ConvNextV2ForImageClassification", four, **stages),
        entry("ResNetForImageClassification", four, embedding_size=8, **stages, layer_type="bottleneck"),
        entry("ResNetBackbone", lambda: image(64), embedding_size=8, **stages, out_features=["stage2", "stage4"]),
        entry("RegNetForImageClassification", four, embedding_size=8, **stages, groups_width=8),
        entry("BitForImageClassification", four, embedding_size=8, **stages, num_groups=4, layer_type="bottleneck"),
        entry("MobileNetV1ForImageClassification", four, depth_multiplier=0.25),
        entry("MobileNetV2ForImageClassification", four, depth_multiplier=0.25),
        entry("EfficientNetForImageClassification", four, width_coefficient=0.25, depth_coefficient=0.5, hidden_dim=320,
              num_channels=3, image_size=64),
        entry("SegformerForImageClassification", four, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1],
              num_attention_heads=[1, 2, 2, 4], sr_ratios=[8, 4, 2, 1], decoder_hidden_size=16),
        entry("SegformerForSemanticSegmentation", lambda: segmentation(64), hidden_sizes=[8, 16, 24, 32],
              depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=16),
        entry("PvtForImageClassification", four, image_size=64, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1],
              num_attention_heads=[1, 2, 2, 4], sequence_reduction_ratios=[8, 4, 2, 1], patch_sizes=[4, 2, 2, 2]),
        entry("PvtV2ForImageClassification", four, image_size=64, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1],
              num_attention_heads=[1, 2, 2, 4]),
        entry("PoolFormerForImageClassification", four, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1]),
        entry("SwiftFormerForImageClassification", lambda: image_class(64), embed_dims=[8, 16, 24, 32],
              depths=[1, 1, 1, 1]),
        entry("LevitForImageClassification", lambda: image_class(64), image_size=64, hidden_sizes=[16, 24, 32],
              patch_size=16, num_attention_heads=[2, 2, 2], depths=[1, 1, 1], key_dim=[8, 8, 8],
              down_ops=[["Subsample", 8, 2, 4, 2, 2], ["Subsample", 8, 3, 4, 2, 2]]),
        entry("CvtForImageClassification", four, embed_dim=[8, 16, 32], num_heads=[1, 2, 4], depth=[1, 2, 3],
              attention_drop_rate=[0.0] * 3, drop_rate=[0.0] * 3, drop_path_rate=[0.0] * 3),
        entry("FocalNetForImageClassification", image_class, embed_dim=8, depths=[1, 1, 2], patch_size=2,
              hidden_sizes=[8, 16, 32], focal_levels=[2, 2, 2], focal_windows=[3, 3, 3]),
        entry("MobileViTForImageClassification", four, image_size=64, hidden_sizes=[16, 20, 24],
              neck_hidden_sizes=[8, 8, 16, 24, 24, 24, 32], patch_size=2),
        entry("MobileViTV2ForImageClassification", four, image_size=64, width_multiplier=0.25, patch_size=2),
        entry("VivitForVideoClassification", lambda: {"pixel_values": noise(BATCH, 4, 3, 16, 16),
              "labels": torch.tensor([0, 1, 1, 0])}, image_size=16, num_frames=4, tubelet_size=[2, 8, 8],
              patch_size=...),
        entry("TimesformerForVideoClassification", lambda: {"pixel_values": noise(BATCH, 2, 3, 16, 16),
              "labels": torch.tensor([0, 1, 1, 0])}, image_size=16, num_frames=2),
        entry("VideoMAEForVideoClassification", lambda: {"pixel_values": noise(BATCH, 4, 3, 16, 16),
              "labels": torch.tensor([0, 1, 1, 0])}, image_size=16, num_frames=4, tubelet_size=2),
        entry("ImageGPTForImageClassification", lambda: {"input_ids": ids(BATCH, 64, vocab=90),
              "labels": torch.tensor([0, 1, 1, 0])}, n_positions=64),
        entry("YolosForObjectDetection", lambda: image(32), image_size=[32, 32], num_detection_tokens=5),
        entry("YolosForObjectDetection", lambda: {**boxes(), "pixel_values": noise(BATCH, 3, 32, 32)}, label=" labels",
              image_size=[32, 32], num_detection_tokens=5),
        entry("DetrForObjectDetection", lambda: image(64), **detr),
        entry("DetrForObjectDetection", boxes, label=" labels", **detr),
        entry("ConditionalDetrForObjectDetection", lambda: image(64), **detr),
        entry("DabDetrForObjectDetection", lambda: image(64), **detr),
        entry("DeformableDetrForObjectDetection", lambda: image(64), **detr, num_feature_levels=3,
              encoder_n_points=2, decoder_n_points=2),
        entry("RTDetrForObjectDetection", lambda: image(64), backbone_config={"model_type": "rt_detr_resnet",
              "embedding_size": 8, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "layer_type": "basic",
              "out_features": ["stage2", "stage3", "stage4"]}, encoder_hidden_dim=32, encoder_in_channels=[16, 16, 32],
              d_model=32, num_queries=6, decoder_in_channels=[32, 32, 32], decoder_layers=2, num_denoising=0,
              feat_strides=[8, 16, 32], encoder_layers=1),
        entry("MaskFormerForInstanceSegmentation", lambda: image(64), backbone_config={"model_type": "swin",
              "embed_dim": 8, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2], "window_size": 2, "image_size": 64,
              "out_features": ["stage1", "stage2", "stage3", "stage4"]}, fpn_feature_size=32, mask_feature_size=16,
              decoder_config={"model_type": "detr", "d_model": 32, "encoder_layers": 1, "decoder_layers": 2,
              "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
              "num_queries": 5, "use_timm_backbone": False, "backbone_config": BACKBONE, "backbone": None}),
        entry("Mask2FormerForUniversalSegmentation", lambda: image(64), backbone_config={"model_type": "swin",
              "embed_dim": 8, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2], "window_size": 2, "image_size": 64,
              "out_features": ["stage1", "stage2", "stage3", "stage4"]}, feature_size=32, mask_feature_size=32,
              hidden_dim=32, encoder_feedforward_dim=32, dim_feedforward=32, encoder_layers=1, decoder_layers=2,
              num_queries=5),
        entry("UperNetForSemanticSegmentation", lambda: segmentation(64), backbone_config={"model_type": "convnext",
              **stages, "out_features": ["stage1", "stage2", "stage3", "stage4"]}, backbone=None, hidden_size=16,
              auxiliary_in_channels=24, auxiliary_channels=8, use_auxiliary_head=True),
        entry("DPTForDepthEstimation", image, backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8, 8, 16, 16],
              fusion_hidden_size=8, is_hybrid=False),
        entry("DPTForSemanticSegmentation", segmentation, backbone_out_indices=[0, 1, 2, 3],
              neck_hidden_sizes=[8, 8, 16, 16], fusion_hidden_size=8, is_hybrid=False),
        entry("GLPNForDepthEstimation", lambda: image(64), hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1],
              num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=8),
        entry("DepthAnythingForDepthEstimation", image, backbone_config={"model_type": "dinov2", "hidden_size": 32,
              "num_hidden_layers": 4, "num_attention_heads": 4, "image_size": 32, "patch_size": 8,
              "out_features": ["stage1", "stage2", "stage3", "stage4"], "reshape_hidden_states": False},
              backbone=None, patch_size=8, reassemble_hidden_size=32, neck_hidden_sizes=[8, 8, 16, 16],
              fusion_hidden_size=8, head_hidden_size=8),
        entry("VitMatteForImageMatting", lambda: image(32, 4), backbone_config={"model_type": "vitdet",
              "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "image_size": 32, "patch_size": 16,
              "num_channels": 4, "out_features": ["stage4"]}, backbone=None, hidden_size=32,
              convstream_hidden_sizes=[8, 8, 16], fusion_hidden_sizes=[32, 16, 8, 8]),
        entry("SegGptModel", lambda: {"pixel_values": noise(BATCH, 3, 16, 16), "prompt_pixel_values":
              noise(BATCH, 3, 16, 16, seed=3), "prompt_masks": noise(BATCH, 3, 16, 16, seed=4)}, image_size=[32, 16],
              patch_size=8, mlp_dim=64, pretrain_image_size=32, intermediate_hidden_state_indices=[1, 3], merge_index=1,
              decoder_hidden_size=8),
        entry("ZoeDepthForDepthEstimation", image),
        entry("TextNetForImageClassification", four),
        entry("SuperPointForKeypointDetection", lambda: image(32)),
    ]  # fmt: skip
    return found
