"""Models of vit-pytorch. It is imported with a stub of torchvision, which only its data augmentation uses."""

# ruff: noqa: C408 (settings are written as keyword arguments)
from __future__ import annotations

import importlib
from typing import Any

from benchmarks.zoo_models import BATCH, Entry, noise, stub_torchvision


def entries() -> list[Entry]:
    stub_torchvision()
    import vit_pytorch  # noqa: F401

    def entry(module: str, name: str, shape: tuple[int, ...] = (3, 32, 32), **settings: Any) -> Entry:
        def build() -> Any:
            return getattr(importlib.import_module(f"vit_pytorch.{module}"), name)(**settings)

        return Entry(f"{module}.{name}", build, lambda: (noise(BATCH, *shape),))

    vit: dict[str, Any] = dict(image_size=32, patch_size=8, num_classes=5, dim=32, depth=4, heads=4, mlp_dim=64)
    return [
        entry("vit", "ViT", **vit, dim_head=8),
        entry("simple_vit", "SimpleViT", **vit, dim_head=8),
        entry("simple_vit_with_register_tokens", "SimpleViT", **vit, dim_head=8),
        entry("simple_flash_attn_vit", "SimpleViT", **vit, dim_head=8),
        entry("vit_with_patch_dropout", "ViT", **vit, dim_head=8),
        entry("vit_for_small_dataset", "ViT", **vit, dim_head=8),
        entry("deepvit", "DeepViT", **vit, dim_head=8),
        entry("cait", "CaiT", **vit, dim_head=8, cls_depth=2, layer_dropout=0.0),
        entry("parallel_vit", "ViT", **vit, dim_head=8, num_parallel_branches=2),
        entry("t2t", "T2TViT", image_size=32, num_classes=5, dim=32, depth=4, heads=4, mlp_dim=64,
              t2t_layers=((3, 2), (3, 2))),
        entry("cct", "CCT", img_size=32, embedding_dim=32, n_conv_layers=1, kernel_size=7, stride=2, padding=3,
              pooling_kernel_size=3, pooling_stride=2, pooling_padding=1, num_layers=4, num_heads=4, mlp_ratio=2.0,
              num_classes=5, positional_embedding="learnable"),
        entry("pit", "PiT", image_size=32, patch_size=8, dim=32, num_classes=5, depth=(1, 1, 2), heads=4, mlp_dim=64),
        entry("levit", "LeViT", image_size=64, num_classes=5, stages=2, dim=(16, 32), depth=2, heads=(2, 4), mlp_mult=2,
              shape=(3, 64, 64)),
        entry("cvt", "CvT", num_classes=5, s1_emb_dim=8, s2_emb_dim=16, s3_emb_dim=32, s3_depth=2, s3_heads=2,
              shape=(3, 64, 64)),
        entry("twins_svt", "TwinsSVT", num_classes=5, s1_emb_dim=8, s2_emb_dim=16, s3_emb_dim=16, s4_emb_dim=32,
              s3_depth=1, s4_depth=1, s1_local_patch_size=4, s2_local_patch_size=4, s3_local_patch_size=4,
              s4_local_patch_size=2, s1_global_k=4, s2_global_k=2, s3_global_k=2, s4_global_k=1, shape=(3, 64, 64)),
        entry("cross_vit", "CrossViT", image_size=32, num_classes=5, depth=2, sm_dim=16, sm_patch_size=8, lg_dim=32,
              lg_patch_size=16, sm_enc_depth=1, lg_enc_depth=1, cross_attn_depth=1),
        entry("crossformer", "CrossFormer", num_classes=5, dim=(32, 32, 64, 64), depth=(1, 1, 1, 1),
              global_window_size=(4, 2, 2, 1), local_window_size=2, shape=(3, 64, 64)),
        entry("regionvit", "RegionViT", dim=(8, 16, 24, 32), depth=(1, 1, 1, 1), window_size=2, num_classes=5,
              shape=(3, 64, 64)),
        entry("scalable_vit", "ScalableViT", num_classes=5, dim=8, heads=(1, 2, 2, 4), depth=(1, 1, 1, 1),
              ssa_dim_key=(8, 8, 8, 8), reduction_factor=(4, 2, 2, 1), window_size=(8, 4, None, None), shape=(3, 64,
              64)),
        entry("max_vit", "MaxViT", num_classes=5, dim_conv_stem=8, dim=8, dim_head=8, depth=(1, 1), window_size=4,
              shape=(3, 32, 32)),
        entry("nest", "NesT", image_size=32, patch_size=4, dim=8, heads=2, num_hierarchies=2, block_repeats=(1, 1),
              num_classes=5),
        entry("mobile_vit", "MobileViT", image_size=(64, 64), dims=[16, 24, 32], channels=[8, 8, 16, 16, 24, 24, 32,
              32, 40, 40, 64], num_classes=5, shape=(3, 64, 64)),
        entry("xcit", "XCiT", **vit, dim_head=8, cls_depth=1, local_patch_kernel_size=3),
        entry("rvt", "RvT", **vit),
        entry("learnable_memory_vit", "ViT", **vit, dim_head=8),
        entry("vivit", "ViViT", image_size=16, image_patch_size=8, frames=4, frame_patch_size=2, num_classes=5, dim=32,
              spatial_depth=2, temporal_depth=2, heads=4, mlp_dim=64, shape=(3, 4, 16, 16)),
        entry("vit_3d", "ViT", image_size=16, image_patch_size=8, frames=4, frame_patch_size=2, num_classes=5, dim=32,
              depth=4, heads=4, mlp_dim=64, shape=(3, 4, 16, 16)),
        entry("vit_1d", "ViT", seq_len=64, patch_size=8, num_classes=5, dim=32, depth=4, heads=4, mlp_dim=64,
              shape=(3, 64)),
        entry("normalized_vit", "nViT", image_size=32, patch_size=8, num_classes=5, dim=32, depth=4, heads=4,
              dim_head=8, mlp_dim=64),
    ]  # fmt: skip
