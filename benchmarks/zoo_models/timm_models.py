"""Models of timm, imported with a stub of torchvision, which only its data transforms use."""

# ruff: noqa: C408 (settings are written as keyword arguments)
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.zoo_models import BATCH, Entry, noise, stub_torchvision


def entries() -> list[Entry]:
    stub_torchvision()
    import timm

    def entry(name: str, size: int = 64, *, label: str = "", **settings: Any) -> Entry:
        build: Callable[[], Any] = lambda: timm.create_model(name, pretrained=False, num_classes=5, **settings)  # noqa: E731
        return Entry(name + label, build, lambda: (noise(BATCH, 3, size, size),))

    tests = [entry(name, 160 if "vit" in name or "coatnet" in name else 64) for name in timm.list_models("test_*")]
    vit: dict[str, Any] = dict(img_size=32, patch_size=8, embed_dim=32, depth=4, num_heads=4)
    four = dict(depths=(1, 1, 1, 1), dims=(8, 16, 24, 32))
    return [
        *tests,
        entry("vit_tiny_patch16_224", 32, **vit),
        entry("vit_tiny_patch16_224", 32, label=" avg pool", **vit, global_pool="avg", class_token=False),
        entry("vit_tiny_patch16_224", 32, label=" layer scale", **vit, init_values=0.1, qk_norm=True, reg_tokens=2),
        entry("deit_tiny_distilled_patch16_224", 32, **vit),
        entry("beit_base_patch16_224", 32, **vit),
        entry("eva02_tiny_patch14_224", 32, **vit),
        entry("cait_xxs24_224", 32, **vit),
        entry("xcit_nano_12_p16_224", 32, **{**vit, "patch_size": 16}),
        entry("mixer_s32_224", 64, img_size=64),
        entry("resmlp_12_224", 64, img_size=64),
        entry("gmlp_ti16_224", 64, img_size=64),
        entry("swin_tiny_patch4_window7_224", 32, img_size=32, window_size=4, embed_dim=8, depths=(1, 1, 2),
              num_heads=(1, 2, 2), patch_size=2),
        entry("swinv2_tiny_window8_256", 32, img_size=32, window_size=4, embed_dim=8, depths=(1, 1, 2),
              num_heads=(1, 2, 2), patch_size=2),
        entry("convnext_tiny", **four),
        entry("convnextv2_atto", **four),
        entry("poolformer_s12", label=" full size"),
        entry("pvt_v2_b0", depths=(1, 1, 1, 1), embed_dims=(8, 16, 20, 32)),
        entry("resnet18", layers=(1, 1, 1, 1), channels=(8, 16, 24, 32)),
        entry("resnet50", layers=(1, 1, 1, 1), channels=(8, 16, 24, 32)),
        entry("seresnet18", layers=(1, 1, 1, 1), channels=(8, 16, 24, 32)),
        entry("resnetv2_50", layers=(1, 1, 1, 1), channels=(16, 16, 32, 32), stem_chs=8),
        entry("densenet121", growth_rate=4, block_config=(2, 2, 2, 2)),
        entry("mobilenetv2_050", label=" small"),
        entry("mobilenetv3_small_050"),
        entry("mobilenetv4_conv_small_035"),
        entry("lcnet_035"),
        entry("tinynet_e"),
        entry("ghostnet_050"),
        entry("mnasnet_small"),
        entry("regnetx_002"),
        entry("dla46_c"),
        entry("hrnet_w18_small"),
        entry("selecsls42"),
        entry("vovnet39a", label=" full size"),
        entry("repvgg_a0", label=" full size"),
        entry("edgenext_xx_small"),
        entry("mobilevit_xxs"),
        entry("mobileone_s0", label=" full size"),
        entry("levit_128s", 224, label=" full size"),
        entry("efficientformerv2_s0", 224, label=" full size"),
        entry("fastvit_t8", 64, label=" full size"),
        entry("coatnet_nano_rw_224", 64, label=" full size", img_size=64),
        entry("maxvit_rmlp_pico_rw_256", 64, label=" full size", img_size=64),
        entry("crossvit_9_240", 240, label=" full size"),
        entry("visformer_tiny", 64, label=" full size", img_size=64),
        entry("inception_v3", 96, label=" full size"),
        entry("resnet18", label=" features", layers=(1, 1, 1, 1), channels=(8, 16, 24, 32), features_only=True),
    ]  # fmt: skip
